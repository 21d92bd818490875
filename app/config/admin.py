"""The section `admin`: the status page and its actions, on a port of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.config.errors import ConfigError, Problem, Refused
from app.config.keys import is_loopback

TOKEN_VARIABLE = "TIDEGATE_ADMIN_TOKEN"
SHORTEST_TOKEN = 16  # characters


class AdminConfig(BaseModel):
    """Status page of the fleet and actions on it: docs/operations.md."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = Field(default=True, strict=True, description="Serve the status page.")
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address that it listens on, on the head node of the Ray cluster. One that other machines reach "
        "needs a token, which then also reading needs.",
    )
    port: int = Field(default=8001, ge=1, le=65_535, strict=True, description="Its port, never that of the API.")
    token_file: str | None = Field(
        default=None,
        pattern=r"^[/~]",
        description=f"Absolute path, on the head node, of a file with the secret that actions need; {SHORTEST_TOKEN} "
        "characters at least.",
    )
    token_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description=f"Environment variable that holds it, instead of `token_file`. Null: `{TOKEN_VARIABLE}`, which "
        "`make serve` sets. Without a token the page is there to read only.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> AdminConfig:
        if self.token_file is not None and self.token_env is not None:
            what, allowed = "token_file is set as well", "one of token_file and token_env"
            raise Refused(Problem("token_env", what, self.token_env, allowed, "remove one of the two"))
        if self.enabled and not is_loopback(self.host) and self.token_file is None and self.token_env is None:
            what = f"the status page would be open to other machines (host is {self.host}) without a token"
            remedy = "set it, or `admin.token_env`, or `admin.host: 127.0.0.1` and reach it through an SSH tunnel"
            raise Refused(Problem("token_file", what, None, "a token when the host is not 127.0.0.1", remedy))
        return self

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach it."""
        return not is_loopback(self.host)

    def port_problem(self, api_port: int | None) -> Problem | None:
        """What is wrong with its port beside `api_port` (of Serve's http_options), if anything."""
        if not self.enabled or self.port != api_port:
            return None
        return Problem("admin.port", "the API has this port (http_options.port)", self.port, "another", "change one")

    def token(self, environ: Mapping[str, str]) -> str | None:
        """The secret, None if there is none; ConfigError if it was promised and is not there, or is too short."""
        if self.token_file is not None:
            path = Path(self.token_file).expanduser()
            try:
                return _checked("admin.token_file", path.read_text("utf-8").strip(), self.token_file)
            except (OSError, UnicodeDecodeError) as error:
                what = getattr(error, "strerror", None) or "not UTF-8 text"
                remedy = "make it readable there"
                problem = Problem("admin.token_file", what, self.token_file, "a file on the head node", remedy)
                raise ConfigError([problem]) from error
        name = self.token_env or TOKEN_VARIABLE
        if name in environ:
            return _checked("admin.token_env", environ[name], name)
        if self.token_env is None:
            return None
        what, remedy = "the environment variable is not set", "set it, for instance in `runtime_env.env_vars`"
        raise ConfigError([Problem("admin.token_env", what, name, "a variable that is set", remedy)])


def _checked(path: str, token: str, source: str) -> str:
    if len(token) >= SHORTEST_TOKEN and token.isascii() and token.isprintable() and " " not in token:
        return token
    allowed = f"{SHORTEST_TOKEN} printable ASCII characters or more, no spaces"
    remedy = "make one: python -c 'import secrets; print(secrets.token_urlsafe())'"
    raise ConfigError([Problem(path, "the token in it cannot be used (it is not shown)", source, allowed, remedy)])
