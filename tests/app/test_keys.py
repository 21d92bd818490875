"""API keys: the list and its mistakes, the check, the command that makes one, and the public host."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from app.config import ConfigError, check_file, load_config
from app.config.keys import ApiKeysConfig, KeyEntry, is_loopback, parse_keys, read_keys
from app.errors import Unauthorized
from app.key_ring import KeyRing
from app.keys import PREFIX, main, new_key
from app.rate_limits import Limits
from app.tier_choice import KeyTiers

ROOT = Path(__file__).parents[2]
TIERS = ["critical", "standard", "background"]
HASH = hashlib.sha256(b"secret").hexdigest()


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    """The headers of a client with this key."""
    return [(b"authorization", f"Bearer {key}".encode())]


def test_a_key_is_known_by_either_header() -> None:
    """Each key of the list is found, sent OpenAI's or Anthropic's way, and brings its tenant, tiers and limits."""
    (one, first), (two, second) = (
        new_key("acme", tiers=["standard", "background"], default_tier="background", requests_per_minute=60),
        new_key("corp"),
    )
    ring = KeyRing([first, second], TIERS)
    for headers in (bearer(one), [(b"X-API-Key", one.encode())], [(b"Authorization", f"bearer  {one}".encode())]):
        key = ring.check(headers)
        assert key is not None
        assert (key.tenant, key.tiers) == ("acme", KeyTiers(frozenset({1, 2}), 2))
        assert key.limits == Limits(60, None)
    other = ring.check(bearer(two))
    assert other is not None
    assert (other.tenant, other.tiers, other.limits) == ("corp", KeyTiers(None, None), None)


@given(st.binary(max_size=60))
def test_any_other_key_is_refused(given_key: bytes) -> None:
    """No key, an empty one, a hash, another scheme, or any bytes: 401's error with the way to authenticate."""
    key, entry = new_key("acme")
    ring = KeyRing([entry], TIERS)
    tries: list[list[tuple[bytes, bytes]]] = [
        *([(b"authorization", b"Bearer " + given_key)], [(b"x-api-key", given_key)]),
        *([], bearer(""), bearer(entry.hash), bearer(key + "x"), bearer(key[:-1])),
        [(b"authorization", f"Basic {key}".encode())],
    ]
    for headers in tries:
        with pytest.raises(Unauthorized) as refused:
            ring.check(headers)
        assert refused.value.headers[0][0] == b"www-authenticate"
        assert key not in str(refused.value)


def test_without_keys_everybody_may_call() -> None:
    """An empty ring asks nobody for a key."""
    assert KeyRing([], TIERS).check([]) is None


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("", "keys.yaml", "not a list"),
        ("a: [", "keys.yaml", "not YAML"),
        ("hash: x", "keys.yaml", "not a list"),
        ("[]", "keys.yaml", "not a list"),
        (f"- hash: {HASH}\n", "keys.yaml, key 1 (line 1).tenant", "required key is missing"),
        (f"\n- tenant: a\n  hash: {HASH}\n- tenant: b\n  hash: SHA", "keys.yaml, key 2 (line 4).hash", "right form"),
        (f"- {{hash: {HASH}, tenant: a b}}", "keys.yaml, key 1 (line 1).tenant", "right form"),
        (f"- {{hash: {HASH}, tenant: a, tier: x}}", "keys.yaml, key 1 (line 1).tier", "unknown key"),
        ("- {key: tg-secret, tenant: a}", "keys.yaml, key 1 (line 1).hash", "missing"),
        (f"- {{hash: {HASH}, tenant: a, tiers: [gold]}}", "keys.yaml, key 1 (line 1).tiers[0]", "no such tier"),
        (f"- {{hash: {HASH}, tenant: a, tiers: []}}", "keys.yaml, key 1 (line 1).tiers", "range"),
        (
            f"- {{hash: {HASH}, tenant: a, tiers: [standard], default_tier: critical}}",
            "keys.yaml, key 1 (line 1).default_tier",
            "no such tier",
        ),
        (
            f"- {{hash: {HASH}, tenant: a, tokens_per_minute: 0}}",
            "keys.yaml, key 1 (line 1).tokens_per_minute",
            "range",
        ),
        (f"- {{hash: {HASH}, tenant: a}}\n- {{hash: {HASH}, tenant: b}}", "keys.yaml, key 2 (line 2).hash", "same key"),
        ("- 7", "keys.yaml, key 1 (line 1)", "type"),
    ],
)
def test_a_bad_list_names_line_and_field(text: str, place: str, what: str) -> None:
    """Each mistake in a list of keys is told with its file, line and field, and no key is shown."""
    with pytest.raises(ConfigError) as refused:
        parse_keys(text, TIERS, "keys.yaml")
    problem = refused.value.problems[0]
    assert problem.path == place
    assert what in problem.what
    assert "tg-secret" not in str(refused.value)


def test_list_from_file_or_environment(tmp_path: Path) -> None:
    """YAML and JSON, a file and a variable mean the same; what is missing is named."""
    rows = [{"hash": HASH, "tenant": "acme", "tiers": ["critical"]}]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(rows))
    expected = [KeyEntry(hash=HASH, tenant="acme", tiers=["critical"])]
    assert read_keys(ApiKeysConfig(file=str(file)), TIERS, {}) == expected
    assert read_keys(ApiKeysConfig(env="KEYS"), TIERS, {"KEYS": yaml.safe_dump(rows)}) == expected
    assert read_keys(ApiKeysConfig(), TIERS, {}) == []
    for section, field in ((ApiKeysConfig(file=str(tmp_path / "none")), "file"), (ApiKeysConfig(env="KEYS"), "env")):
        with pytest.raises(ConfigError) as refused:
            read_keys(section, TIERS, {})
        assert refused.value.problems[0].path == f"api_keys.{field}"


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"file": "keys.yaml"}, "api_keys.file"),
        ({"env": "A B"}, "api_keys.env"),
        ({"file": "/k", "env": "K"}, "api_keys.env"),
        ({"allow_public_without_keys": "yes"}, "api_keys.allow_public_without_keys"),
        ({"keys": []}, "api_keys.keys"),
    ],
)
def test_a_bad_section_names_the_field(section: dict[str, Any], path: str) -> None:
    """Each mistake of the section has its own path."""
    with pytest.raises(ConfigError) as refused:
        load_config({"api_keys": section}, "cpu")
    assert [problem.path for problem in refused.value.problems] == [path]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8", None])
def test_loopback_needs_no_keys(host: str | None) -> None:
    """A fleet that only this machine can reach, or that serves no HTTP, starts without keys."""
    assert ApiKeysConfig().public_problem(host) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", ""])
def test_public_host_needs_keys_or_a_word(host: str) -> None:
    """Elsewhere keys are needed, or the explicit word that none are."""
    problem = ApiKeysConfig().public_problem(host)
    assert problem is not None
    assert "allow_public_without_keys" in problem.remedy
    assert not is_loopback(host)
    for section in (ApiKeysConfig(file="/k"), ApiKeysConfig(env="K"), ApiKeysConfig(allow_public_without_keys=True)):
        assert section.public_problem(host) is None


def test_check_file_sees_host_and_keys(tmp_path: Path) -> None:
    """The check of a Serve file refuses a public host without keys, and a list of keys that is wrong."""
    text = (ROOT / "serve_config.yaml").read_text()
    file, keys = tmp_path / "serve.yaml", tmp_path / "keys.yaml"
    public = text.replace("host: 127.0.0.1", "host: 0.0.0.0")
    assert public != text
    file.write_text(public)
    with pytest.raises(ConfigError, match="open to other machines") as refused:
        check_file(file, "cpu")
    assert refused.value.problems[0].path == "applications[0].args.api_keys"
    file.write_text(public.replace("    args:\n", f"    args:\n      api_keys: {{file: {keys}}}\n"))
    check_file(file, "cpu")  # the list is elsewhere: the ingress will look for it
    keys.write_text("- {tenant: a}")
    with pytest.raises(ConfigError, match=r"key 1 \(line 1\)\.hash"):
        check_file(file, "cpu")
    keys.write_text(f"- {{tenant: a, hash: {HASH}}}")
    check_file(file, "cpu")


def test_new_prints_a_key_once_and_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed entry is a valid list, and the printed key opens it."""
    main(["new", "--tenant", "acme", "--tiers", "standard", "background", "--tokens-per-minute", "1000"])
    output = capsys.readouterr().out
    entries = parse_keys(output, TIERS, "stdout")
    assert (entries[0].tenant, entries[0].tiers, entries[0].tokens_per_minute) == (
        "acme",
        ["standard", "background"],
        1000,
    )
    (key,) = (word for word in output.split() if word.startswith(PREFIX))
    assert KeyRing(entries, TIERS).check(bearer(key))
    assert len(key) >= 43
    with pytest.raises(SystemExit):
        main(["new", "--tenant", "a b"])


def test_the_command_runs_without_the_engine() -> None:
    """`python -m app.keys` imports no vLLM: making a key takes no 10 seconds."""
    code = "import sys, app.keys; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
