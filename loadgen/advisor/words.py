"""The advice in sentences: what is enough, what it rests on, what comes nearest where nothing is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.advisor.advise import SLOWER, Advice
from loadgen.advisor.serve_config import Machine
from loadgen.advisor.trial import Pair, Trial
from loadgen.run.slo import NAMES, Slo, Slos, slo_of
from loadgen.simulator.hardware import DEVICES

RESERVING = ("no_preempt", "s3")  # schedulers that go by max_tokens, which is the true length here


def bounds(slo: Slo) -> str:
    """The bounds as they are written on the command line."""
    return ",".join(f"{name}={value:g}" for name in NAMES if math.isfinite(value := getattr(slo, name)))


def fleet(trial: Trial, machine: Machine, price: float | None) -> str:
    """So many replicas on so many devices, and what they cost."""
    devices = trial.replicas * machine.tp
    on = f" on {devices} x {machine.device}" if machine.device else " on this machine's cores"
    text = f"{trial.replicas} {'replica' if trial.replicas == 1 else 'replicas'} of {machine.model}{on}, {trial.pair}"
    if price is not None:
        text += f": {price * devices:.2f} per hour"
        if tokens := sum(run.output_tokens for run in trial.runs):
            hours = sum(run.seconds for run in trial.runs) / 3600
            text += f", {price * devices * hours / tokens * 1e6:.2f} per million answer tokens of this workload"
    return text


def answer(advice: Advice, machine: Machine, slos: Slos, price: float | None) -> list[str]:
    """The answer, one sentence or two each line."""
    if advice.best is not None:
        lines = [f"Enough: {fleet(advice.best, machine, price)}."]
        count, seeds = advice.best.replicas, len(advice.best.runs)
        lines.append(
            f"In {'the' if seeds == 1 else f'each of {seeds}'} simulated {'run' if seeds == 1 else 'runs'} at least "
            f"{advice.target:.3g} of each tier's requests are within their bounds; the worst tier has "
            f"{advice.best.worst:.4f}."
        )
        if advice.shaky:
            lines.append(f"Shaky: with {count + 1} replicas it does not hold. Measure before you rely on {count}.")
        return lines
    if advice.hopeless:
        lines = ["Nothing is enough; no fleet was searched for."]
        for tier in advice.hopeless:
            slo = slo_of(slos, tier)
            lines.append(
                f"No number of replicas would do for tier {tier}: even on an idle replica only "
                f"{advice.alone[tier]:.2f} of its requests are within {bounds(slo) if slo else 'bounds'}; "
                f"{advice.target:.3g} are asked for. Ask for less, or take a faster device."
            )
        return lines
    nearest = advice.nearest
    assert nearest is not None
    return [
        f"Nothing is enough, up to {advice.most} replicas. Nearest: {fleet(nearest, machine, price)}, where the worst "
        f"tier has {nearest.worst:.4f} of its requests within bounds; {advice.target:.3g} are asked for.",
        "On an idle replica the bounds are kept: more replicas may do, see --max-replicas.",
    ]


def confidence(machine: Machine, fitted: str | None, error: float | None, advice: Advice) -> list[str]:
    """How far the answer can be trusted."""
    if fitted is not None:
        text = f"Calibrated: step times fitted to measured ones ({fitted}"
        text += f"; off by {error:.1%} on runs that the fit did not see)." if error is not None else ")."
    else:
        device = DEVICES[machine.device or ""]
        text = (
            f"Roofline: nobody has measured this. Step times follow from the data sheet of {machine.device}; its "
            f"efficiencies are {device.source}; attention, all-reduce and host time are not measured. Measure one "
            "replica (`loadgen calibrate`, --fitted) before you buy."
        )
    lines = [text]
    if advice.best is not None:
        for factor in SLOWER:
            need, share = advice.slower[factor], f"If each step took {factor - 1:.0%} longer"
            if need is None:
                lines.append(f"{share}, {advice.most} replicas would not be enough.")
            elif need == advice.best.replicas:
                lines.append(f"{share}, they would still be enough.")
            else:
                lines.append(f"{share}, it would take {need}.")
    lines.append(
        "Not simulated: network and HTTP (add what `bench ingress` measures), prefix caching, failures, start-up of "
        "replicas. The future is taken to look like the trace."
    )
    return lines


def caveats(pairs: Sequence[Pair], chosen: Pair | None) -> list[str]:
    """What the policies knew that they do not know in production."""
    names = {
        pair.scheduling["name"]: None
        for pair in ([chosen] if chosen else pairs)
        if "predictor" in pair.scheduling or pair.scheduling["name"] in RESERVING
    }
    return [
        f"`{name}` knew the true length of each answer here; in production it knows `max_tokens` at best."
        for name in names
    ]
