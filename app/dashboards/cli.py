"""`python -m app.dashboards`: list the dashboards, write them as files, or push them to a Grafana."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from app.dashboards.alerts import alerts
from app.dashboards.boards import BOARDS
from app.dashboards.files import DISCOVERY, export
from app.dashboards.push import PushError, push

TOKEN = "GRAFANA_TOKEN"  # environment variable
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands `list`, `export` and `push`."""
    commands = parser.add_subparsers(dest="dashboards_command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="the dashboards and alert rules")
    files = commands.add_parser("export", help="write JSON, provisioning, alert rules and a prometheus.yml")
    files.add_argument("folder", type=Path, metavar="DIR", help="where to; files there are overwritten")
    files.add_argument(
        "--discovery", default=DISCOVERY, metavar="FILE", help="Ray's list of metrics ports (default: %(default)s)"
    )
    grafana = commands.add_parser("push", help="make the dashboards of a Grafana what they are here")
    grafana.add_argument("--url", required=True, help="of Grafana, such as http://localhost:3000")
    grafana.add_argument("--token", help=f"of a service account with the role Editor (default: ${TOKEN})")


def run(args: argparse.Namespace, console: Console) -> int:
    """Do what the arguments of `add_arguments` ask; returns the exit code."""
    if args.dashboards_command == "list":
        for board in BOARDS:
            console.print(f"{board.uid}: {len(board.panels)} panels. {board.help}", highlight=False, soft_wrap=True)
        for alert in alerts():
            console.print(f"{alert.name} ({alert.severity})", highlight=False)
        return 0
    try:
        if args.dashboards_command == "export":
            for path in export(args.folder, args.discovery):
                console.print(str(path), highlight=False, soft_wrap=True)
            return 0
        token = args.token or os.environ.get(TOKEN)
        if not token:
            raise PushError(f"give a token: --token, or the environment variable {TOKEN}")
        for uid, outcome in push(args.url, token).items():
            console.print(f"{uid} {outcome}", highlight=False)
    except (PushError, OSError) as error:
        Console(stderr=True).print(f"dashboards: {error}", highlight=False, soft_wrap=True, markup=False)
        return FAILED
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run one command line."""
    parser = argparse.ArgumentParser(
        prog="python -m app.dashboards", description="Grafana dashboards and Prometheus alert rules of a fleet."
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments), Console())
