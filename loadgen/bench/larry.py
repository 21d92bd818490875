"""`bench policies` for LARRY alone, with more seeds."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from loadgen.bench import policies

TITLE = "LARRY against FCFS on the real engine: waiting times under overload (about 4 minutes)"
SEEDS = (0, 1, 2, 3, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench policies`."""
    policies.add_arguments(parser, ["larry"])


def run(args: argparse.Namespace, console: Console) -> Path:
    """As `bench policies`."""
    return policies.run(args, console)
