"""The section `api_keys`, and the list of keys that it points to."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.config.errors import ConfigError, Problem, Refused, problems_of, suggestion

_Count = Annotated[int, Field(ge=1, strict=True)]


class ApiKeysConfig(BaseModel):
    """Who may call the HTTP API; without `file` and `env` anybody who reaches the port."""

    model_config = ConfigDict(extra="forbid")

    file: str | None = Field(
        default=None,
        pattern=r"^[/~]",
        description="Absolute path of the YAML or JSON list of keys, where ingresses run.",
    )
    env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable of the ingress that holds the same list, instead of `file`.",
    )
    allow_public_without_keys: bool = Field(
        default=False, strict=True, description="Serve other machines although anybody may then call."
    )

    @model_validator(mode="after")
    def _one_source(self) -> ApiKeysConfig:
        if self.file is not None and self.env is not None:
            raise Refused(
                Problem("env", "file is set as well", self.env, "one of file and env", "remove one of the two")
            )
        return self

    @property
    def on(self) -> bool:
        """Whether a request needs a key."""
        return self.file is not None or self.env is not None

    def public_problem(self, host: str | None) -> Problem | None:
        """What is wrong with listening on `host` (of Serve's http_options), if anything."""
        if self.on or self.allow_public_without_keys or host is None or is_loopback(host):
            return None
        return Problem(
            "api_keys",
            f"the API would be open to other machines (http_options.host is {host}) without keys",
            None,
            "a list of keys when the host is not 127.0.0.1",
            "set `api_keys.file` (python -m app.keys new), or `http_options.host: 127.0.0.1`, or, where something in "
            "front of the fleet checks the callers, `api_keys.allow_public_without_keys: true`",
        )


class KeyEntry(BaseModel):
    """One key of the list."""

    model_config = ConfigDict(extra="forbid")
    MOVED: ClassVar[dict[str, str]] = {"key": "never store the key itself: put its sha256 into `hash`"}

    hash: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, hexadecimal.")
    tenant: str = Field(pattern=r"^\S{1,64}$", description="Who holds it; appears in the access log.")
    tiers: Annotated[list[str], Field(min_length=1)] | None = Field(
        default=None, description="Tiers that its requests may have. Null: all."
    )
    default_tier: str | None = Field(
        default=None, description="Tier of its requests that ask for none. Null: that of `tiers`, within those allowed."
    )
    requests_per_minute: _Count | None = Field(
        default=None, description="Limit in the whole fleet.", json_schema_extra={"unit": "requests/min"}
    )
    tokens_per_minute: _Count | None = Field(
        default=None,
        description="Prompt and generated tokens, limit in the whole fleet.",
        json_schema_extra={"unit": "tokens/min"},
    )


class _KeyList(BaseModel):
    keys: list[KeyEntry]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_keys(section: ApiKeysConfig, tiers: list[str], environ: Mapping[str, str]) -> list[KeyEntry]:
    """The keys that the section points to; ConfigError names the file, the line and the field at fault."""
    if section.file is not None:
        path = Path(section.file).expanduser()
        try:
            return parse_keys(path.read_text("utf-8"), tiers, str(path))
        except (OSError, UnicodeDecodeError) as error:
            what = getattr(error, "strerror", None) or "not UTF-8 text"
            remedy = "make it readable there (python -m app.keys new)"
            problem = Problem("api_keys.file", what, section.file, "a file on the ingress's machine", remedy)
            raise ConfigError([problem]) from error
    if section.env is not None:
        if section.env not in environ:
            remedy = "set it for the ingress, for instance in `runtime_env.env_vars`"
            what = "the environment variable is not set"
            raise ConfigError([Problem("api_keys.env", what, section.env, "a variable that is set", remedy)])
        return parse_keys(environ[section.env], tiers, f"${section.env}")
    return []


def parse_keys(text: str, tiers: list[str], source: str) -> list[KeyEntry]:
    """The keys in a YAML or JSON list; `source` names it in errors, `tiers` are the names that exist."""
    try:
        node, content = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = " ".join(str(error).split())
        raise ConfigError([Problem(source, "not YAML", where, "a list of keys", "correct the place named")]) from error
    if node is None or not isinstance(content, list) or not content:
        raise ConfigError(
            [Problem(source, "not a list of keys", type(content).__name__, "a list", "write `- hash: ...`")]
        )
    lines = [item.start_mark.line + 1 for item in node.value]
    try:
        entries = _KeyList.model_validate({"keys": content}).keys
    except ValidationError as error:
        problems = problems_of(error, _KeyList, {"keys": content})
    else:
        problems = [
            problem for i, entry in enumerate(entries) for problem in _tier_problems(f"keys[{i}]", entry, tiers)
        ]
        problems += _repeated(entries)
        if not problems:
            return entries
    raise ConfigError(_at_line(problem, source, lines) for problem in problems)


def _at_line(problem: Problem, source: str, lines: list[int]) -> Problem:
    index, _, field = problem.path.removeprefix("keys[").partition("]")
    place = f"{source}, key {int(index) + 1} (line {lines[int(index)]}){field}" if index.isdigit() else source
    # what was given may be the key itself, which belongs in no log
    got = "not shown" if field.startswith((".hash", ".key")) or not field else problem.got
    return Problem(place, problem.what, got, problem.allowed, problem.remedy)


def _tier_problems(path: str, entry: KeyEntry, tiers: list[str]) -> list[Problem]:
    named = [(f"{path}.tiers[{i}]", name, tiers) for i, name in enumerate(entry.tiers or [])]
    if entry.default_tier is not None:
        named.append((f"{path}.default_tier", entry.default_tier, entry.tiers or tiers))
    return [
        Problem(place, "no such tier for this key", name, ", ".join(known), suggestion(name, known) + "use one of them")
        for place, name, known in named
        if name not in known
    ]


def _repeated(entries: list[KeyEntry]) -> list[Problem]:
    hashes = [entry.hash for entry in entries]
    return [
        Problem(f"keys[{i}].hash", "the same key stands above", None, "each key once", "remove one of the two")
        for i, found in enumerate(hashes)
        if found in hashes[:i]
    ]
