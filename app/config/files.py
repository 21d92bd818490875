"""Check a whole Serve file: Serve's own keys, the `args` of its Tidegate applications and their live settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from app.config.engine import Device
from app.config.errors import ConfigError, Problem, problems_of, suggestion
from app.config.keys import read_keys
from app.config.schema import TidegateConfig, UserConfig, load_config

IMPORT_PATH = "app.main:build"
_DEPLOYMENTS = ("EngineReplica", "Ingress", "Coordinator", "Admin")


def check_file(path: Path, device: Device | None = None) -> None:
    """Raise ConfigError with every problem of the file, which may be that it cannot be read."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError([Problem(str(path), "cannot be read", why, "a YAML file", "name the Serve file")]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(
            [Problem(str(path), "not YAML", where, "a YAML mapping", "correct the place named")]
        ) from error
    if not isinstance(content, dict):
        remedy = "write `applications` and what belongs to it, as in serve_config.yaml"
        raise ConfigError([Problem(str(path), "not a Serve file", content, "a YAML mapping", remedy)])
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise ConfigError(problems_of(error, ServeDeploySchema, content)) from error
    if all(application["import_path"] != IMPORT_PATH for application in content["applications"]):
        got = [application["import_path"] for application in content["applications"]]
        remedy = f"add an application with `import_path: {IMPORT_PATH}`, or correct the one that is meant"
        raise ConfigError([Problem("applications", "none of them is Tidegate's", got, IMPORT_PATH, remedy)])
    problems = [
        replace(problem, path=f"applications[{index}].{problem.path}")
        for index, application in enumerate(content["applications"])
        if application["import_path"] == IMPORT_PATH
        for problem in _application(application, content.get("http_options") or {}, device)
    ]
    if problems:
        raise ConfigError(problems)


def check_keys(config: TidegateConfig) -> None:
    """Raise ConfigError for a list of API keys that is here and wrong; ingresses elsewhere may have it elsewhere."""
    section = config.api_keys
    environ = {**os.environ, **(config.runtime_env or {}).get("env_vars", {})}
    here = Path(section.file).expanduser().exists() if section.file is not None else section.env in environ
    if here:
        read_keys(section, config.tiers.names, environ)


def _application(application: dict[str, Any], http: dict[str, Any], device: Device | None) -> Iterator[Problem]:
    try:
        config = load_config(application.get("args") or {}, device)
        for problem in (config.api_keys.public_problem(http.get("host")), config.admin.port_problem(http.get("port"))):
            if problem is not None:
                yield replace(problem, path=f"args.{problem.path}")
        check_keys(config)
    except ConfigError as error:
        for problem in error.problems:
            yield problem if problem.path == "args" else replace(problem, path=f"args.{problem.path}")
    for index, deployment in enumerate(application.get("deployments") or []):
        place, name = f"deployments[{index}]", deployment["name"]
        if name not in _DEPLOYMENTS:
            remedy = suggestion(name, _DEPLOYMENTS) + "rename or remove it"
            yield Problem(f"{place}.name", "no such deployment", name, ", ".join(_DEPLOYMENTS), remedy)
        elif name == "EngineReplica" and (settings := deployment.get("user_config")) is not None:
            try:
                UserConfig.model_validate(settings)
            except ValidationError as error:
                for problem in problems_of(error, UserConfig, settings):
                    yield replace(problem, path=f"{place}.user_config.{problem.path}")
