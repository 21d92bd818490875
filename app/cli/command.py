"""Command line of Tidegate: `tidegate COMMAND`, or `python -m app COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from app.cli import status
from app.cli.explain import explain, show
from app.config import ConfigError, TidegateConfig, UserConfig, check_file
from app.dashboards import cli as dashboards

FAILED, INTERRUPTED = 1, 130
EXIT_CODES = "Exit codes: 0 done, 1 failed or refused, 2 wrong usage; drain: 3 not empty in time."

#: Commands that are programs of their own: name -> module with main(arguments, prog=...), arguments put first, help.
_PROGRAMS: dict[str, tuple[str, list[str], str]] = {
    "drain": ("app.drain", [], "take a replica out of service and wait until it is empty; without one: list them"),
    "undrain": ("app.drain", ["--undo"], "let a replica that was drained take requests again"),
    "keys": ("app.keys", [], "make API keys"),
}


def parser() -> argparse.ArgumentParser:
    """The whole command line; every command of this program sets `call`, a function of (args, console) -> exit code."""
    top = argparse.ArgumentParser(
        prog="tidegate", description="Look at a Tidegate fleet and act on it.", epilog=EXIT_CODES
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    looking = commands.add_parser("status", help=status.TITLE, description=status.TITLE, epilog=EXIT_CODES)
    status.add_arguments(looking)
    looking.set_defaults(call=status.run)
    for name, (_, _, text) in _PROGRAMS.items():
        commands.add_parser(name, help=text, add_help=False)
    boards = commands.add_parser("dashboards", help="Grafana dashboards and alert rules: list, export, push")
    dashboards.add_arguments(boards)
    boards.set_defaults(call=dashboards.run)
    config = commands.add_parser("config", help="check and explain a Serve file; the schema of its keys")
    parts = config.add_subparsers(metavar="COMMAND", required=True)
    title = "validate a Serve file and say what it means, without starting anything"
    check = parts.add_parser("check", help=title, description=title, epilog=EXIT_CODES)
    check.add_argument("file", type=Path, metavar="FILE")
    check.add_argument("--json", action="store_true", help="print what it means, or what is wrong, as JSON")
    check.set_defaults(call=_check)
    title = "print the JSON schema of `applications[].args`"
    schema = parts.add_parser("schema", help=title, description=title)
    schema.add_argument("--user-config", action="store_true", help="of the live settings in `user_config` instead")
    schema.set_defaults(call=_schema)
    return top


def _check(args: argparse.Namespace, console: Console) -> int:
    try:
        check_file(args.file)
    except ConfigError as error:
        if args.json:
            problems = [
                {"path": p.path, "what": p.what, "got": repr(p.got), "allowed": p.allowed, "remedy": p.remedy}
                for p in error.problems
            ]
            print(json.dumps({"file": str(args.file), "valid": False, "problems": problems}, indent=2))
        else:
            print(f"{args.file} cannot be served:\n{error}", file=sys.stderr)
        return FAILED
    meaning = explain(args.file)
    if args.json:
        print(json.dumps({"file": str(args.file), "valid": True, "applications": meaning}, indent=2, default=str))
        return 0
    for application in meaning:
        show(application, console)
    console.print(f"{args.file} is valid")
    return 0


def _schema(args: argparse.Namespace, _: Console) -> int:
    model = UserConfig if args.user_config else TidegateConfig
    print(json.dumps(model.model_json_schema(by_alias=True), indent=2))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(given)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor does the flush at the end fail
        return FAILED
    return code


def _run(given: list[str]) -> int:
    if given and given[0] in _PROGRAMS:
        module, first, _ = _PROGRAMS[given[0]]
        ended: int | None = importlib.import_module(module).main([*first, *given[1:]], prog=f"tidegate {given[0]}")
        return ended or 0
    args = parser().parse_args(given)
    code: int = args.call(args, Console())
    return code
