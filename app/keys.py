"""Make an API key of the HTTP API: `python -m app.keys new --tenant NAME`.

Only hashes are kept. A key is 32 random bytes, so that a plain SHA-256 cannot be turned back by guessing.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys

import yaml
from pydantic import ValidationError

from app.config.errors import problems_of
from app.config.keys import KeyEntry

PREFIX = "tg-"


def new_key(tenant: str, **more: object) -> tuple[str, KeyEntry]:
    """A fresh key and its entry; `more` are further fields of the entry."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, KeyEntry.model_validate({"hash": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **more})


def main(arguments: list[str] | None = None, prog: str = "python -m app.keys") -> int:
    """Print a new key, once, and the entry for the list of keys."""
    parser = argparse.ArgumentParser(prog=prog, description=main.__doc__)
    new = parser.add_subparsers(required=True).add_parser("new", help="make a key")
    new.add_argument("--tenant", required=True, help="who holds it")
    new.add_argument("--tiers", nargs="+", metavar="TIER", help="tiers that it may use; all if left out")
    new.add_argument("--default-tier", metavar="TIER", help="tier of requests that ask for none")
    new.add_argument("--requests-per-minute", type=int, metavar="N")
    new.add_argument("--tokens-per-minute", type=int, metavar="N")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        key, entry = new_key(**given)
    except ValidationError as error:
        parser.error("\n".join(map(str, problems_of(error, KeyEntry, given))))
    print(f"# The key, shown only now; give it to the client:\n#   {key}\n# The entry for the list of keys:")
    print(yaml.safe_dump([entry.model_dump(exclude_none=True)], sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
