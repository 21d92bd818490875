"""`tidegate status`: the facts of the status page as a table or as JSON, once or again and again."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from datetime import datetime
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.config.admin import TOKEN_VARIABLE, AdminConfig

TITLE = "show the fleet: replicas, KV cache, queues, moves, recent events"
URL_VARIABLE = "TIDEGATE_ADMIN_URL"
_DEFAULT = AdminConfig()
EVENTS = 8
WIDE = 120  # columns in which the table has room for what each tier has


class NoAnswerError(RuntimeError):
    """The admin server does not answer, or does not know the token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "--url",
        default=os.environ.get(URL_VARIABLE, f"http://{_DEFAULT.host}:{_DEFAULT.port}"),
        help=f"admin server, section `admin` of the Serve file (default: {URL_VARIABLE} or %(default)s); one that "
        f"other machines reach asks for the token in {TOKEN_VARIABLE}",
    )
    parser.add_argument("--json", action="store_true", help="print what /status.json says; its schema is beside it")
    parser.add_argument(
        "--watch", nargs="?", type=float, const=1.0, metavar="S", help="again every S seconds (1), until ctrl-C"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the status; exit code 1 if nobody answers."""
    try:
        if args.watch is None:
            status = fetch(args.url)
            print(json.dumps(status, indent=2)) if args.json else console.print(table(status, console.width))
            return 0
        with contextlib.suppress(KeyboardInterrupt):
            watch(args.url, max(0.1, args.watch), console, lines=args.json)
    except NoAnswerError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def fetch(url: str) -> dict[str, Any]:
    """One answer of the admin server."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token and not (token.isascii() and token.isprintable()):
        raise NoAnswerError(f"{TOKEN_VARIABLE} holds what no HTTP header can: set it to the token and nothing else")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    where = f"{url.rstrip('/')}/status.json"
    try:
        answer = httpx.get(where, headers=headers, timeout=10.0, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswerError(
            f"no status page answers at {where} ({error}): is the fleet up, and is this its `admin` host and port? "
            f"Name another with --url or {URL_VARIABLE}"
        ) from error
    try:
        content: dict[str, Any] = answer.json()
    except ValueError:
        content = {}
    if answer.status_code != 200 or "replicas" not in content:
        said = (content.get("error") or {}).get("message") or "this is no Tidegate status page"
        raise NoAnswerError(f"{where} answered {answer.status_code}: {said} (the token is taken from {TOKEN_VARIABLE})")
    return content


def watch(url: str, every_s: float, console: Console, lines: bool) -> None:
    """Show the status until ctrl-C; `lines`: a line of JSON each time."""
    if lines:
        while True:
            print(json.dumps(fetch(url)), flush=True)
            time.sleep(every_s)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(table(fetch(url), console.width), refresh=True)
            time.sleep(every_s)


def table(status: dict[str, Any], width: int) -> RenderableType:
    """The status for a terminal of `width` columns; on a narrow one the tiers have lines of their own."""
    totals, names = status["totals"], [tier["name"] for tier in status["tiers"]]
    moves = sum(outcomes.get("done", 0) for outcomes in status["migration"]["moves"].values())
    head = Text(
        f"{status['application']}: {status['model']}, {status['serve_status']}, {totals['serving']} of "
        f"{totals['replicas']} replicas serve, {totals['running']} running, {totals['waiting']} waiting, "
        f"{_percent(totals['used_blocks'], totals['total_blocks'])} of KV used, {moves} moved"
    )
    parts: list[RenderableType] = [head]
    for name in ("coordinator", "serve"):
        if (problem := status[name]["problem"]) is not None:
            parts.append(Text(f"{name} does not answer ({problem}): what it said last is shown", style="bold red"))
    replicas = Table(show_edge=False, pad_edge=False, header_style="dim")
    for title in ("replica", "state"):
        replicas.add_column(title, no_wrap=True)
    for title in ("running", "waiting", "KV blocks", "used", "headroom", "phi"):
        replicas.add_column(title, justify="right", no_wrap=True)
    below: list[RenderableType] = []
    if wide := width >= WIDE:
        replicas.add_column("running + waiting by tier")
    for row in status["replicas"]:
        tiers = [(name, t["running"], t["waiting"]) for name, t in zip(names, row["tiers"], strict=True)]
        by_tier = ", ".join(f"{name} {running}+{waiting}" for name, running, waiting in tiers if running or waiting)
        if by_tier and not wide:
            below.append(Text(f"{row['id']}: {by_tier} (running + waiting)"))
        replicas.add_row(
            row["id"],
            Text(row["state"], style={"serving": "green", "draining": "yellow"}.get(row["state"], "red")),
            f"{row['running']}/{row['max_num_seqs']}",
            str(row["waiting"]),
            f"{row['used_blocks']}/{row['total_blocks']}",
            _percent(row["used_blocks"], row["total_blocks"]),
            f"{row['headroom_blocks']:.0f}",
            "-" if row["phi"] is None else f"{row['phi']:.2f}",
            *([by_tier or "-"] if wide else []),
        )
    parts += [replicas, *below]
    parts += [Text(f"moving: {m['count']} from {m['source']} to {m['destination']}") for m in status["moving"]]
    for section in ("scheduling", "balancing"):
        chosen = status["settings"][section]
        more = "".join(f" {key}={value}" for key, value in chosen.items() if key != "policy" and value is not None)
        parts.append(Text(f"{section}: {chosen['policy']}{more}", style="dim"))
    for event in status["events"][:EVENTS]:
        parts.append(Text(f"{datetime.fromtimestamp(event['t']):%H:%M:%S}  {event['text']}", style="dim"))
    return Group(*parts)


def _percent(part: float, of: float) -> str:
    return f"{100 * part / of:.0f} %" if of else "-"
