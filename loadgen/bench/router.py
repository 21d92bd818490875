"""Cost of a routing decision and age of the reports it rests on. Needs no engine and no Ray cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen import arguments
from loadgen.metrics import percentile
from loadgen.report import Stamp, Steps, show

TITLE = "routing: microseconds per decision for 4 to 512 replicas, age of load reports (about 2 minutes)"
SEEDS = (0, 1, 2)
GOAL_DECISION_US = 5.0
GOAL_AGE_MS = 5.0
STEP_S = 0.010


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench router`."""
    parser.add_argument(
        "--replicas", type=arguments.count, nargs="+", default=[4, 64, 512], help="default: %(default)s"
    )
    parser.add_argument(
        "--calls", type=arguments.count, default=6000, help="decisions per figure and seed (default: %(default)s)"
    )
    parser.add_argument("--publishers", type=arguments.count, nargs="+", default=[4, 64], help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=arguments.positive, default=5.0, help="per age and seed (default: %(default)s)"
    )


def run(args: argparse.Namespace, console: Console) -> Path:
    """Measure every seed, take the median over seeds of each figure, print and write."""
    from loadgen.bench import report_age, router_cost
    from policies.balancing import BALANCING

    stamp = Stamp("router", vars(args), args.seeds)
    policies = BALANCING.names()
    total = len(args.seeds) * (len(args.replicas) * (2 * len(policies) + 1) + len(args.publishers))
    table: dict[str, Any] = {}
    serve: dict[str, Any] = {}
    ages: dict[str, Any] = {}
    with Steps(console, total) as steps:
        for replicas in args.replicas:
            steps.begin(f"table, {replicas} replicas")
            for policy in policies:
                runs = [router_cost.table_costs(policy, replicas, args.calls, seed) for seed in args.seeds]
                warm = [router_cost.warm_cost(policy, replicas, args.calls, seed) for seed in args.seeds]
                table.setdefault(policy, {})[str(replicas)] = {**median(runs), "choose_warm": median(warm)}
                steps.done(len(args.seeds))
            steps.begin(f"Serve router, {replicas} replicas")
            for router in (*policies, router_cost.RAY_DEFAULT):
                timed = [router_cost.serve_cost(router, replicas, args.calls, seed) for seed in args.seeds]
                serve.setdefault(router, {})[str(replicas)] = median(timed)
                steps.done(len(args.seeds))
        for publishers in args.publishers:
            steps.begin(f"reports, {publishers} publishers")
            runs = []
            for seed in args.seeds:
                runs.append(report_age.ages(publishers, STEP_S, args.seconds, seed))
                steps.done()
            ages[str(publishers)] = median(runs)
    _print(console, args, table, serve, ages)
    figures = {"fleet_table_us": table, "serve_router_us": serve, "report_age_ms": ages}
    goals = {"decision_p50_us_at_512": GOAL_DECISION_US, "report_age_at_use_p50_ms": GOAL_AGE_MS}
    return stamp.write({**figures, "goals": goals, "step_s": STEP_S}, args.out)


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure, the median over runs of the same shape."""
    return {
        key: median([r[key] for r in runs]) if isinstance(value, dict) else percentile([r[key] for r in runs], 50)
        for key, value in runs[0].items()
    }


def _print(
    console: Console, args: argparse.Namespace, table: dict[str, Any], serve: dict[str, Any], ages: dict[str, Any]
) -> None:
    sizes = [str(n) for n in args.replicas]
    replicas = [f"{n} replicas" for n in sizes]
    show(
        console,
        "choosing on the fleet table, microseconds p50 / p99",
        ("policy", *replicas),
        [(name, *(_both(by[n]["choose"], "us") for n in sizes)) for name, by in table.items()],
    )
    show(
        console,
        "the same call repeated with nothing in between (warm), microseconds p50 / p99",
        ("policy", *replicas),
        [(name, *(_both(by[n]["choose_warm"], "us") for n in sizes)) for name, by in table.items()],
    )
    show(
        console,
        "book-keeping on the fleet table, microseconds p50 / p99 (policy: tiered_sal)",
        ("call", *replicas),
        [
            (call, *(_both(table["tiered_sal"][n][call], "us") for n in sizes))
            for call in ("dispatch", "complete", "apply")
        ],
    )
    show(
        console,
        "the whole choice as Serve awaits it, microseconds p50 / p99",
        ("router", *replicas),
        [(name, *(_both(by[n], "us") for n in sizes)) for name, by in serve.items()],
    )
    rows = [
        ("a request came or went: written to in the table", "delivery_count"),
        ("figures of any step: written to in the table", "delivery_step"),
        ("age at use: written to decision", "age_at_use"),
        ("behind at use: newer figures had existed for", "behind"),
    ]
    show(
        console,
        f"load reports, engine steps of {STEP_S * 1e3:.0f} ms on average, milliseconds p50 / p99",
        ("", *(f"{n} publishers" for n in ages)),
        [(label, *(_both(age[key], "ms") for age in ages.values())) for label, key in rows]
        + [("reports/s at the router", *(age["reports_per_s"] for age in ages.values()))],
    )


def _both(figures: dict[str, float], unit: str) -> str:
    return f"{figures[f'p50_{unit}']:.2f} / {figures[f'p99_{unit}']:.2f}"
