"""The multi-tier paper: its tables 2 to 4, the number of tiers, the schedulers it is compared with, and its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from loadgen.experiments import plots
from loadgen.experiments.experiment import Claim, Condition, Experiment, Figures, grid
from loadgen.experiments.results import Results
from loadgen.experiments.tiers import (
    ACCOUNTING,
    ACCOUNTINGS,
    BASELINE,
    BLOCK_SIZE,
    BLOCKS,
    DEVICE,
    FIGURES,
    HONEST,
    LENGTHS,
    LIMIT_S,
    MULTI_TIER,
    NO_MIX,
    PAPER,
    PRODUCT,
    REPLICAS,
    SEQUENCES,
    SYSTEMS,
    Play,
    play,
)
from loadgen.svg import Plot

MIXES = ("uniform", "gaussian", "enterprise")
BURST, CALM = 1250.0, 10.0  # requests/s
TEN, FIFTEEN = 10_000, 15_000
CALM_REQUESTS = 1000
PARTS = 2000  # requests of the experiment on the parts: a burst of 1.6 s, which is served in a few of them
SETTINGS = {
    "replicas": f"{REPLICAS} of Llama-2-7B on {DEVICE}",
    "KV cache of a replica": f"{BLOCKS} blocks of {BLOCK_SIZE} tokens",
    "sequences": SEQUENCES,
    "lengths": f"{LENGTHS} (the paper's table 1, prompt to answer 2:1)",
}
# Tables 2 to 4: mix, requests, tiers -> how many times lower than under INFaaS with vLLM.
GAINS = (
    ("ttft_p99_s", "prefill p99"),
    ("ttft_mean_s", "prefill mean"),
    ("e2e_p99_s", "E2E p99"),
    ("e2e_mean_s", "E2E mean"),
)
TABLES: Mapping[tuple[str, int, int], tuple[float, float, float, float]] = {
    ("uniform", TEN, 3): (4.79, 8.23, 2.87, 2.80),
    ("uniform", TEN, 4): (4.87, 8.23, 3.13, 2.88),
    ("uniform", TEN, 5): (4.16, 8.11, 3.04, 2.92),
    ("uniform", FIFTEEN, 3): (2.98, 5.00, 1.87, 1.97),
    ("uniform", FIFTEEN, 4): (3.16, 5.16, 2.12, 2.08),
    ("uniform", FIFTEEN, 5): (2.72, 5.07, 2.04, 2.12),
    ("gaussian", TEN, 3): (3.24, 7.47, 2.26, 2.45),
    ("gaussian", TEN, 4): (4.25, 8.33, 3.07, 2.79),
    ("gaussian", TEN, 5): (3.49, 7.51, 2.43, 2.74),
    ("gaussian", FIFTEEN, 3): (2.00, 4.68, 1.49, 1.71),
    ("gaussian", FIFTEEN, 4): (2.70, 5.24, 2.02, 1.96),
    ("gaussian", FIFTEEN, 5): (2.25, 4.88, 1.97, 1.67),
    ("enterprise", TEN, 3): (3.10, 8.06, 2.18, 2.27),
    ("enterprise", TEN, 4): (4.41, 8.28, 3.02, 2.79),
    ("enterprise", TEN, 5): (4.12, 8.14, 2.96, 2.89),
    ("enterprise", FIFTEEN, 3): (1.77, 4.51, 1.31, 1.44),
    ("enterprise", FIFTEEN, 4): (2.76, 5.04, 1.94, 1.95),
    ("enterprise", FIFTEEN, 5): (2.61, 5.06, 1.97, 2.08),
}
KS = (3, 4, 5)
SWEEP = tuple(range(1, 11))
PART_NAMES = (
    *("infaas", "infaas, tiers in queues", "freeness", "freeness, tiers in queues"),
    *("and headroom", "and migration", MULTI_TIER, PRODUCT),
)
_WHY = {
    PAPER: "our step times are a roofline, theirs a regression on profiles that we do not have",
    HONEST: "the paper's system holds 15 to 65 times the KV cache that a replica has, and pays for 32 decodes at most",
}


def _burst(condition: Condition, seed: int, scale: float) -> Figures:
    """A burst of requests, 1,250 a second, under a system."""
    return _play(condition, seed, round(int(condition["requests"]) * scale), BURST)


def _calm(condition: Condition, seed: int, scale: float) -> Figures:
    """Ten requests a second."""
    return _play(condition, seed, round(CALM_REQUESTS * scale), CALM)


def _parts(condition: Condition, seed: int, scale: float) -> Figures:
    """A shorter burst, in four tiers of equal shares, with no more than the replicas have."""
    return _play({**condition, "mix": "uniform", "tiers": 4, "accounting": HONEST}, seed, round(PARTS * scale), BURST)


def _play(condition: Condition, seed: int, requests: int, rate: float) -> Figures:
    what = Play(
        system=str(condition["system"]),
        accounting=str(condition["accounting"]),
        mix=str(condition["mix"]),
        tiers=int(condition["tiers"]),
        requests=requests,
        rate=rate,
        limit_s=LIMIT_S if rate == BURST else math.inf,
    )
    return play(what, seed)


def _baseline(accounting: str, requests: int) -> dict[str, str | int]:
    return {"system": BASELINE, "mix": NO_MIX, "tiers": 1, "requests": requests, "accounting": accounting}


def _gains(accounting: str) -> list[Claim]:
    return [
        Claim(
            f"{mix}, {requests:,} requests, K={tiers}, {accounting}: {name}, times lower",
            figure,
            {"system": MULTI_TIER, "mix": mix, "tiers": tiers, "requests": requests, "accounting": accounting},
            _baseline(accounting, requests),
            (paper, paper),
            _WHY[accounting],
        )
        for (mix, requests, tiers), gains in TABLES.items()
        for (figure, name), paper in zip(GAINS, gains, strict=True)
    ]


def _costs() -> list[Claim]:
    return [
        Claim(
            f"uniform, {requests:,} requests, K=4, {accounting}: replica-seconds, times lower",
            "replica_s",
            {"system": MULTI_TIER, "mix": "uniform", "tiers": 4, "requests": requests, "accounting": accounting},
            _baseline(accounting, requests),
        )
        for requests in (TEN, FIFTEEN)
        for accounting in ACCOUNTINGS
    ]


def _medians(accounting: str) -> list[Claim]:
    def at(mix: str, tiers: int) -> dict[str, str | int]:
        return {"system": MULTI_TIER, "mix": mix, "tiers": tiers, "accounting": accounting}

    return [
        Claim(f"K=1, {accounting}: E2E median, s", "e2e_p50_s", at("uniform", 1), None, (10.0, 12.0), _WHY[accounting]),
        Claim(
            f"K=3, uniform, {accounting}: TTFT median of tier 0, s",
            "top_ttft_p50_s",
            at("uniform", 3),
            None,
            (0.25, 0.35),
            _WHY[accounting],
        ),
        Claim(
            f"K=5, Gaussian, {accounting}: TTFT median of tier 0, s",
            "top_ttft_p50_s",
            at("gaussian", 5),
            None,
            (0.0, 0.5),
            _WHY[accounting],
        ),
    ]


def _calm_claims() -> list[Claim]:
    return [
        Claim(
            f"10 requests/s, {system}, {accounting}: E2E p99, s",
            "e2e_p99_s",
            {"system": system, "accounting": accounting},
            None,
            (1.58, 1.63),
            "the paper's step times are not known to us",
        )
        for accounting in ACCOUNTINGS
        for system in CALM_SYSTEMS
    ]


def _draw_tables(results: Results) -> Mapping[str, Plot]:
    drawn = {}
    for requests in (TEN, FIFTEEN):
        for accounting in ACCOUNTINGS:
            groups: list[plots.Series] = [
                (f"{mix[:4]}. K={k}", {"mix": mix, "tiers": k, "requests": requests, "accounting": accounting})
                for mix in MIXES
                for k in KS
            ]
            drawn[f"ttft-p99-{requests // 1000}k-{accounting}"] = plots.places(
                results,
                "ttft_p99_s",
                groups,
                [(MULTI_TIER, {"system": MULTI_TIER})],
                title=f"TTFT p99, {requests:,} requests, {accounting}",
                y_title="s",
            )
    return drawn


def _draw_sweep(results: Results) -> Mapping[str, Plot]:
    drawn = {}
    for accounting in ACCOUNTINGS:
        for figure, title in (
            ("top_ttft_p50_s", "TTFT p50 of tier 0"),
            ("last_ttft_p50_s", "TTFT p50 of the last tier"),
        ):
            drawn[f"{figure.split('_')[0]}-{accounting}"] = plots.curve(
                results,
                "tiers",
                figure,
                [(mix, {"mix": mix, "accounting": accounting}) for mix in MIXES],
                title=f"{title} by number of tiers, {accounting}",
                x_title="tiers",
                y_title="s",
            )
    return drawn


def _draw_parts(results: Results) -> Mapping[str, Plot]:
    series = [("tier 0", "top_ttft_p50_s"), ("last tier", "last_ttft_p50_s"), ("all", "ttft_mean_s")]
    groups = [(str(i + 1), {"system": name}) for i, name in enumerate(PART_NAMES)]
    return {
        figure.removesuffix("_s").replace("_", "-"): plots.places(
            results, figure, groups, [(name, {})], title=f"TTFT by parts of the system: {name}", y_title="s"
        )
        for name, figure in series
    }


CALM_SYSTEMS = (BASELINE, "infaas+orca", "infaas+sarathi", MULTI_TIER)
_NO_COST = (
    "The paper's column cost/latency is 1 - 1/(speed-up of E2E p99), so it says nothing of its own, and is left out; "
    "replica-seconds are here instead: four replicas until the last answer"
)
_BLIND = "The baseline knows no tiers, so it is simulated once for all mixes and numbers of them"
_CENSORED = (
    "Its runs end after 60 s. Where the baseline needs longer, its worst waits are cut off there, and the speed-ups "
    "with them (`ended`)"
)
_RESERVE = (
    "In the paper's code the headroom of all tiers together grows with K (34 % of the cache at K=4, 77 % at K=10), so "
    "a sweep of K is one of the reserve too; `honest` caps it at 35 %"
)

EXPERIMENTS = (
    Experiment(
        name="tiers-tables",
        title="Three mixes of tiers in a burst, against INFaaS with vLLM",
        source="multi-tier paper: tables 2 to 4",
        conditions=[
            *(_baseline(accounting, requests) for requests in (TEN, FIFTEEN) for accounting in ACCOUNTINGS),
            *grid(system=(MULTI_TIER,), mix=MIXES, tiers=KS, requests=(TEN, FIFTEEN), accounting=ACCOUNTINGS),
        ],
        cell=_burst,
        figures=FIGURES,
        settings={**SETTINGS, "arrivals": f"Poisson, {BURST:g}/s"},
        claims=[*_gains(PAPER), *_gains(HONEST), *_costs()],
        plots=_draw_tables,
        remarks=(*ACCOUNTING, _BLIND, _NO_COST, _CENSORED),
    ),
    Experiment(
        name="tiers-sweep",
        title="One to ten tiers",
        source="multi-tier paper: its sweeps of K; of their curves our notes give three values",
        conditions=grid(system=(MULTI_TIER,), mix=MIXES, tiers=SWEEP, requests=(TEN,), accounting=ACCOUNTINGS),
        cell=_burst,
        figures=FIGURES,
        settings={**SETTINGS, "arrivals": f"Poisson, {BURST:g}/s"},
        claims=[claim for accounting in ACCOUNTINGS for claim in _medians(accounting)],
        plots=_draw_sweep,
        remarks=(*ACCOUNTING, _RESERVE, _CENSORED),
    ),
    Experiment(
        name="tiers-schedulers",
        title="The paper's schedulers at ten requests a second",
        source="multi-tier paper: comparison with INFaaS and vLLM, Orca and Sarathi",
        conditions=[
            {"system": system, "mix": mix, "tiers": 4 if mix != NO_MIX else 1, "accounting": accounting}
            for accounting in ACCOUNTINGS
            for system in CALM_SYSTEMS
            for mix in (("uniform",) if SYSTEMS[system].tiers else (NO_MIX,))
        ],
        cell=_calm,
        figures=FIGURES,
        settings={**SETTINGS, "requests": CALM_REQUESTS, "arrivals": f"Poisson, {CALM:g}/s"},
        claims=_calm_claims(),
        remarks=(*ACCOUNTING, "At this load little waits, so schedulers have little to decide"),
    ),
    Experiment(
        name="tiers-parts",
        title="Which part of the system separates the tiers",
        source="not in the multi-tier paper: it does not take its system apart",
        conditions=grid(system=PART_NAMES),
        cell=_parts,
        figures=FIGURES,
        settings={**SETTINGS, "requests": PARTS, "arrivals": f"Poisson, {BURST:g}/s", "tiers": "4, uniform"},
        plots=_draw_parts,
        remarks=(
            ACCOUNTING[1],
            "Numbers in the plots are lines of the table. `freeness` sends to the freest replica; each line after it "
            f"adds one part; `{MULTI_TIER}` adds aging; `{PRODUCT}` has LARRY and tiered SAL",
        ),
    ),
)
