"""`python -m loadgen record-lengths` and `train-predictor`: from a running server to a ranker's file."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.markup import escape

from loadgen import arguments
from loadgen.predictor import prompts
from loadgen.report import Steps, show

if TYPE_CHECKING:
    from loadgen.predictor.samples import Samples
    from policies.predictors import Floats, LearnedPredictor

RECORD = "ask a running server prompts of many kinds and log how long it answers"
TRAIN = "train the ranker of `predictor: learned` on a request log or a trace, or say how well one ranks"


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `record-lengths`."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server (default: %(default)s)")
    parser.add_argument(
        "--out", type=arguments.out_file, required=True, metavar="FILE.jsonl", help="lines are appended to it"
    )
    parser.add_argument("--count", type=arguments.count, default=400, help="prompts (default: %(default)s)")
    parser.add_argument("--max-tokens", type=arguments.count, default=256, help="per answer (default: %(default)s)")
    parser.add_argument("--concurrency", type=arguments.count, default=32, help="at once (default: %(default)s)")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of the prompts (default: %(default)s)")


def run_record(args: argparse.Namespace, console: Console) -> int:
    """Record, with a progress bar; status 1 and a message if the server does not play along."""
    from loadgen.predictor.record import RecordingFailed, record

    try:
        drawn = prompts.draw(args.count, np.random.default_rng(args.seed))
        with Steps(console, len(drawn)) as steps:
            steps.begin(f"asking {args.url}")
            options = {"max_tokens": args.max_tokens, "concurrency": args.concurrency}
            asyncio.run(record(args.url.rstrip("/"), drawn, args.out, done=steps.done, **options))
    except (OSError, ValueError, RecordingFailed) as error:
        console.print(f"record-lengths: {escape(str(error))}")
        return 1
    console.print(f"{len(drawn)} requests appended to {args.out}")
    return 0


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `train-predictor`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--log", type=Path, metavar="FILE.jsonl", help="request log: prompt_token_ids, max_tokens, output_tokens"
    )
    source.add_argument(
        "--trace", type=Path, metavar="FILE.csv", help="Azure trace: lengths only, so the ranker sees no tokens"
    )
    parser.add_argument(
        "--out", type=arguments.out_file, metavar="FILE.npz", help="write the ranker, trained on all requests"
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="print how well it ranks requests it was not trained on"
    )
    parser.add_argument("--ranker", type=Path, metavar="FILE.npz", help="evaluate this one instead of training")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of folds and intervals (default: %(default)s)")


def run_train(args: argparse.Namespace, console: Console) -> int:
    """Train, evaluate, write, as asked; status 1 and a message if the input is no good."""
    if bool(args.ranker) == bool(args.out or args.evaluate):
        console.print("train-predictor: give --out FILE.npz, --evaluate or both; or --ranker FILE.npz alone")
        return 2
    try:
        from loadgen.predictor import samples as inputs
        from loadgen.predictor import train
    except ModuleNotFoundError as error:
        console.print(f"train-predictor needs {error.name}: pip install 'tidegate\\[train]'")
        return 1
    try:
        ranker = load(args.ranker) if args.ranker else None
        hashing = (ranker.window, ranker.weights.size) if ranker else (inputs.WINDOW, inputs.BUCKETS)
        samples, complaints = inputs.read_log(args.log, *hashing) if args.log else inputs.read_trace(args.trace)
        for complaint in complaints:
            console.print(f"left out: {escape(complaint)}")
        if ranker:
            _evaluate({args.ranker.name: train.predict(ranker, samples)}, samples, args, console)
        if args.evaluate:
            judged = {"ranker, new requests": train.held_out(samples, args.seed, by_kind=False)}
            if len(set(samples.kinds)) >= train.FOLDS:
                judged["ranker, new kinds"] = train.held_out(samples, args.seed, by_kind=True)
            _evaluate(judged, samples, args, console)
        if args.out:
            window = inputs.WINDOW if args.log else 1
            save(train.train(samples, args.seed, window), args.out)
            console.print(f"written: {args.out}, trained on {len(samples)} requests")
    except (OSError, ValueError) as error:
        console.print(f"train-predictor: {escape(str(error))}")
        return 1
    return 0


def save(ranker: LearnedPredictor, path: Path) -> None:
    """Write the ranker for `predictor_path`; moved in place, so that a running fleet never reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **ranker.to_arrays())
    partial.replace(path)


def load(path: Path) -> LearnedPredictor:
    """The ranker of a file; PolicyError or OSError if it is none."""
    from policies.predictors import LearnedPredictor

    with np.load(path, allow_pickle=False) as arrays:
        return LearnedPredictor.from_arrays(arrays)


def _evaluate(judged: dict[str, Floats], samples: Samples, args: argparse.Namespace, console: Console) -> None:
    from loadgen.predictor.train import RESAMPLES, correlation

    scores = {**judged, "prompt length": samples.prompt_tokens, "max_tokens": samples.max_tokens}
    rows = []
    for name, score in scores.items():
        found = correlation(samples.output_tokens, score, np.random.default_rng(args.seed))
        rows.append((name, _text(found.kendall), _text(found.spearman)))
    source = args.log or args.trace
    title = f"{source.name}: {len(samples)} requests, rank correlation with the generated length"
    show(console, title, ("", "Kendall tau", "Spearman rho"), rows)
    console.print(f"In brackets: 95 % bootstrap interval, {RESAMPLES} resamples. -: the same for all requests.")


def _text(figures: tuple[float, float, float]) -> str:
    value, low, high = figures
    return "-" if np.isnan(value) else f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
