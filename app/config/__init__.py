"""Tidegate's configuration: `applications[].args` of serve_config.yaml, checked before anything starts.

`python -m app.config` prints the reference page, docs/configuration.md.
"""

from app.config.errors import ConfigError, Problem
from app.config.schema import TidegateConfig, UserConfig, load_config

__all__ = ["ConfigError", "Problem", "TidegateConfig", "UserConfig", "load_config"]
