"""`python -m loadgen run`: replay a workload against any OpenAI-compatible server, open loop."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop
from rich.console import Console
from rich.markup import escape

from loadgen import arguments
from loadgen.report import Stamp, rounded, show
from loadgen.run import html, results
from loadgen.run.exact import compare
from loadgen.run.figures import detail, figures
from loadgen.run.handle import PREFIX
from loadgen.run.hooks import Hook, hook
from loadgen.run.measure import APIS, Measured, measure
from loadgen.run.prompts import TIER_PLACES, ProbeFailed
from loadgen.run.slo import slos
from loadgen.workloads import command as workloads
from loadgen.workloads.workload import Workload, describe

TITLE = "send a workload to any OpenAI-compatible server at its times, and report waits, outcomes and goodput by tier"
REPORT_TITLE = "one HTML page with the tables and plots of a run, or of several beside each other with capacity curves"
REPORT = "report.html"
DIGITS = 9  # of the figures in run.json: times of an hour to the microsecond


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `run`."""
    parser.add_argument(
        "url", type=_url, help="server, http://127.0.0.1:8000 say; handle:NAME: an application of this Ray cluster"
    )
    parser.add_argument("--model", help="name of the model (default: the first that the server lists)")
    parser.add_argument(
        "--workload", type=Path, metavar="FILE", help="workload or trace file (default: made by models)"
    )
    parser.add_argument("--api", choices=APIS, default="chat", help="default: %(default)s")
    parser.add_argument("--body", type=_object, default={}, metavar="JSON", help="fields added to every request")
    parser.add_argument("--tier-in", choices=TIER_PLACES, default="header", help="X-Vllm-Priority or `priority`")
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE.json",
        help="secrets by the name of the key (without a name: $OPENAI_API_KEY)",
    )
    parser.add_argument(
        "--template-tokens",
        type=arguments.whole,
        metavar="N",
        help="tokens that the server adds to a prompt (default: asked of it)",
    )
    parser.add_argument(
        "--drain",
        type=arguments.positive,
        default=120.0,
        metavar="S",
        help="wait after the last request (default: 120)",
    )
    parser.add_argument(
        "--slo", action="append", default=[], metavar="[TIER:]ttft=MS,tpot=MS,e2el=MS", help="what counts as goodput"
    )
    parser.add_argument(
        "--at",
        type=_hook,
        action="append",
        default=[],
        metavar="TIME:COMMAND",
        help="run a shell command then: 20s:...",
    )
    parser.add_argument("--token-ids", action="store_true", help="ask for token ids (vLLM: return_token_ids)")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="answers must be those of this earlier run")
    parser.add_argument(
        "--metrics-url",
        action="append",
        metavar="URL|FILE",
        help="Prometheus pages, or Ray's list of them (default: URL/metrics)",
    )
    parser.add_argument("--save-detailed", action="store_true", help="one entry a request in run.json too")
    parser.add_argument("--out", type=arguments.out_folder, metavar="DIR", help="default: runs/DATE")
    workloads.add_model_arguments(parser)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `report`."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="folders that `run` wrote")
    parser.add_argument(
        "--out", type=arguments.out_file, default=Path(REPORT), metavar="FILE.html", help="default: %(default)s"
    )


def run_report(args: argparse.Namespace, console: Console) -> int:
    """Write the report of the runs; status 1 if one of them cannot be read."""
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(html.page(html.load_all(args.runs)))
    except (OSError, ValueError) as error:
        console.print(f"report: {escape(str(error))}")
        return 1
    console.print(f"written: {args.out}")
    return 0


def _url(text: str) -> str:
    if text.startswith(PREFIX):
        return text
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r} is no address; write http://HOST:PORT, or handle:NAME")
    return text


def _hook(text: str) -> Hook:
    try:
        return hook(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def run(args: argparse.Namespace, console: Console) -> int:
    """Run and write the results; status 1 if the run could not be made or answers differ from the reference."""
    try:
        bounds = slos(args.slo)
        workloads.settle(args, args.workload)
        workload = _workload(args)
        reference = None if args.reference is None else results.read_reference(args.reference, workload.digest)
        keys = {} if args.keys is None else results.read_keys(args.keys)
        told = {**vars(args), "at": [f"{h.at:g}s:{h.command}" for h in args.at]}
        stamp = Stamp("run", told, [args.seed])
        workloads.tell_bad_rows(workload, console)
        for tier in sorted({tier for tier in bounds if tier is not None} - {r.tier for r in workload.requests}):
            console.print(f"slo: no request is of tier {tier}; --tiers gives tiers to a workload")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured = runner.run(measure(args, workload, keys, console))
    except (OSError, ValueError, ProbeFailed, aiohttp.ClientError) as error:
        console.print(f"run: {escape(str(error) or type(error).__name__)}")
        return 1
    found = figures(measured.sent, bounds)
    exact = None
    if reference is not None:
        exact = compare([(i, record) for i, _, record in measured.sent], reference)
    folder = args.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    results.write_answers(folder, workload.digest, measured.sent)
    results.write_tables(folder, measured.sent, found)
    result = {
        **_bench_serve(args, workload, measured),
        **found,
        "interrupted": measured.interrupted,
        "not_sent": len(workload.requests) - len(measured.sent),
        "template_tokens": measured.template_tokens,
        "workload": {"about": workload.about, **describe(workload)},
        "hooks": measured.hooks,
        "exact": exact,
        "server_counters": measured.counted,
        **(detail(measured.sent) if args.save_detailed else {}),
    }
    stamp.write(result, folder / results.RUN, DIGITS)
    (folder / REPORT).write_text(html.page([html.load(folder)]))
    _print(console, found, exact, measured, bool(args.metrics_url))
    console.print(f"written: {folder}")
    return int(bool(exact and exact["different"]))


def _workload(args: argparse.Namespace) -> Workload:
    return workloads.make_from(args) if args.workload is None else workloads.file_of(args)


def _bench_serve(args: argparse.Namespace, workload: Workload, measured: Measured) -> dict[str, Any]:
    """What `vllm bench serve` says about the run itself, under its names."""
    arrivals = describe(workload)["arrivals"]
    cv = arrivals["gap_cv"]
    return {
        "backend": "openai-chat" if args.api == "chat" else "openai",
        "endpoint_type": "openai-chat" if args.api == "chat" else "openai",
        "label": None,
        "model_id": measured.model,
        "tokenizer_id": None,
        "num_prompts": len(workload.requests),
        "request_rate": arrivals["rate"],
        "burstiness": 1.0 / (cv * cv) if cv else None,  # of a gamma process with these gaps: its shape
        "max_concurrency": None,
    }


def _print(
    console: Console, found: dict[str, Any], exact: dict[str, Any] | None, measured: Measured, asked_counters: bool
) -> None:
    groups = {**found["tiers"], "all": found}.items()
    heads = ("tier", "asked", *found["outcomes"], "in SLO")
    good = {tier: "-" if g["within_slo"] is None else f"{g['within_slo']:.0%}" for tier, g in groups}
    rows = [(tier, g["asked"], *g["outcomes"].values(), good[tier]) for tier, g in groups]
    show(console, "how the requests ended", heads, rows)
    waits = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99", "E2E p50", "p99")
    names = [f"{p}_{wait}" for wait in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms") for p in ("p50", "p99")]
    show(
        console,
        "milliseconds, TTFT and E2E from when a request was due",
        ("tier", *waits),
        [(tier, *(g[name] for name in names)) for tier, g in groups],
    )
    sent, lag = found["arrivals"], found["lag"]
    console.print(
        f"sent {sent['rate']:.2f}/s, gap CV {sent['gap_cv']:.2f}, dispersion 1 s {sent['iod_1s']:.2f}, peak/mean "
        f"{sent['peak_1s']:.1f}; {found['output_throughput']:.1f} answer tokens/s; late p99 {lag['p99_s'] * 1e3:.1f} ms"
    )
    if lag["client_was_late"]:
        console.print("the client could not keep the times: the waits include its own lag; give it more CPU")
    for ran in measured.hooks:
        console.print(f"at {ran['at']:g} s: {escape(ran['command'])}: status {ran['status']}")
    if measured.counted is None and asked_counters:
        console.print("metrics-url: none of the pages could be read before and after the run: nothing was counted")
    if measured.counted:
        told = ", ".join(f"{name} {rounded(value):g}" for name, value in measured.counted.items() if value)
        console.print(f"the server counted: {told or 'nothing'}")
    if exact is not None:
        console.print(
            f"against the reference: {exact['equal']} equal, {exact['prefix']} cut but agreeing, "
            f"{exact['different']} DIFFERENT, {exact['unknown']} without an answer to compare"
        )
