"""Tidegate's configuration: `applications[].args` of serve_config.yaml, checked before anything starts.

`python -m app.config FILE` checks a Serve file, `python -m app.config` prints the reference page.
"""

from app.config.errors import ConfigError, Problem
from app.config.files import check_file, check_keys
from app.config.schema import TidegateConfig, UserConfig, load_config

__all__ = ["ConfigError", "Problem", "TidegateConfig", "UserConfig", "check_file", "check_keys", "load_config"]
