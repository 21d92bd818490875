"""The section `admin`: what it refuses, where its token comes from, how its deployment is placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.config import ConfigError, load_config
from app.config.admin import TOKEN_VARIABLE, AdminConfig

SECRET = "a-secret-of-some-length"


def problem(section: dict[str, Any]) -> str:
    """The one problem of the section."""
    with pytest.raises(ConfigError) as refused:
        load_config({"admin": section})
    (found,) = refused.value.problems
    return str(found)


def test_loopback_by_default() -> None:
    """Without a section the page is on this machine only, and the API's port is another."""
    admin = load_config({}).admin
    assert (admin.enabled, admin.host, admin.port, admin.is_public) == (True, "127.0.0.1", 8001, False)
    assert admin.token({}) is None
    assert admin.token({TOKEN_VARIABLE: SECRET}) == SECRET


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "fleet.example"])
def test_open_to_others_only_with_a_token(host: str) -> None:
    """An address that other machines reach needs a token that was asked for in the file."""
    assert problem({"host": host}).startswith("admin.token_file: the status page would be open to other machines")
    assert load_config({"admin": {"host": host, "token_env": "X"}}).admin.is_public
    assert load_config({"admin": {"host": host, "enabled": False}}).admin.is_public


def test_one_source_of_the_token() -> None:
    """File and variable together are refused."""
    assert "one of token_file and token_env" in problem({"token_file": "/x", "token_env": "X"})


@pytest.mark.parametrize("text", ["", "short", "with spaces in between it", "ümlaut-ümlaut-ümlaut"])
def test_tokens_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    """A token that is guessed or cannot stand in a header is refused, and not shown in the message."""
    file = tmp_path / "token"
    file.write_text(text, "utf-8")
    for admin, environ in ((AdminConfig(token_file=str(file)), {}), (AdminConfig(token_env="X"), {"X": text})):
        with pytest.raises(ConfigError) as refused:
            admin.token(environ)
        assert not text or text not in str(refused.value)


def test_a_promised_token_must_be_there(tmp_path: Path) -> None:
    """A file or variable that is named and missing is an error, not a page without protection."""
    with pytest.raises(ConfigError, match=r"admin\.token_file"):
        AdminConfig(token_file=str(tmp_path / "none")).token({})
    with pytest.raises(ConfigError, match=r"admin\.token_env"):
        AdminConfig(token_env="X").token({})
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    assert AdminConfig(token_file=str(file)).token({}) == SECRET


def test_it_runs_on_the_head_node_and_costs_nothing() -> None:
    """The deployment asks for Ray's resource of the head node and no CPU; runtime_env goes with it."""
    options = load_config({"runtime_env": {"env_vars": {"A": "b"}}}).admin_options()
    assert options["num_replicas"] == 1
    assert options["ray_actor_options"]["num_cpus"] == 0
    assert set(options["ray_actor_options"]["resources"]) == {"node:__internal_head__"}
    assert options["ray_actor_options"]["runtime_env"] == {"env_vars": {"A": "b"}}
