"""`bench autoscaling`: steps back, time to the minimum, verdicts, the traffic, a small run, and live figures."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadgen.bench import autoscaling, autoscaling_live, scaling_figures
from loadgen.bench.scaling_figures import Rules
from loadgen.cli import main, parser
from loadgen.metrics import RequestRecord

RULES = Rules(1, 5.0, 100.0, 6.0)
SIZES = [(0.0, 1), (10.0, 2), (15.0, 4), (120.0, 2), (126.0, 3), (300.0, 1)]


def served(ttft: float = 0.5, latency: float = 2.0, due: float = 0.0) -> RequestRecord:
    """A request that was answered."""
    return RequestRecord(due, due, 10, 5, ttft, latency, status=200)


def run(policy: str = "freeness", ttft: float = 0.5, replica_s: float = 100.0, **changed: Any) -> dict[str, Any]:
    """Figures of a run that meets every check, but for what is changed."""
    sizes = [(0.0, 1), (10.0, 2), (115.0, 1)]
    figures = scaling_figures.of_run([served(ttft, due=20.0)] * 5, sizes, RULES, replica_s)
    return {"traffic": "step", "policy": policy, "seed": 0, **figures, **changed}


def missed(runs: list[dict[str, Any]]) -> set[int]:
    """Numbers of the checks that are not met."""
    return {i for i, c in enumerate(scaling_figures.checks(runs, scaling_figures.compared(runs))) if not c["met"]}


def test_steps_back_know_the_step_before() -> None:
    """Two steps the same way are no reversal; each step back says how long after the one before it came."""
    assert scaling_figures.turns(SIZES) == [(120.0, 105.0, -1), (126.0, 6.0, 1), (300.0, 174.0, -1)]
    assert scaling_figures.turns([(0.0, 3), (5.0, 3), (9.0, 3)]) == []


def test_most_within_counts_any_stretch() -> None:
    """Not only those that begin at zero; exactly so far apart still counts."""
    assert scaling_figures.most_within([1.0, 90.0, 101.0, 150.0], 100.0) == 3
    assert scaling_figures.most_within([], 10.0) == 0


def test_replica_seconds_end_with_the_run() -> None:
    """What comes after the end costs nothing."""
    assert scaling_figures.replica_seconds(SIZES, 130.0) == 10 + 2 * 5 + 4 * 105 + 2 * 6 + 3 * 4
    assert scaling_figures.replica_seconds(SIZES, 12.0) == 10 + 2 * 2


def test_time_to_the_minimum_is_for_good() -> None:
    """A fleet that was there and left again has not arrived; one that never went is there at once."""
    assert scaling_figures.time_to(1, [(0.0, 2), (50.0, 1), (60.0, 2), (90.0, 1)], 40.0) == 50.0
    assert scaling_figures.time_to(1, [(0.0, 1)], 40.0) == 0.0
    assert scaling_figures.time_to(0, [(0.0, 1)], 40.0) == float("inf")


@pytest.mark.parametrize(
    ("least", "before", "windows"), [(1, 1, 0), (1, 2, 1), (1, 4, 2), (0, 1, 1), (0, 2, 2), (0, 4, 3), (4, 4, 0)]
)
def test_the_last_replica_has_a_window_of_its_own(least: int, before: int, windows: int) -> None:
    """Serve goes to one first, and from there to none."""
    assert replace(RULES, least=least).allowed_s(before) == windows * 106.0


def test_figures_of_a_run() -> None:
    """Early steps back, the most in a window, and what became of the requests."""
    cut = replace(served(), error="it broke off", times=(0.5,))
    figures = scaling_figures.of_run([served(), cut, replace(cut, status=429, times=())], SIZES, RULES, 7.0)
    assert (figures["reversals"], figures["early"], figures["reversals_in_window"]) == (3, 0, 2)
    assert (figures["requests"], figures["cut"], figures["not_ok"], figures["most"]) == (3, 1, 2, 4)
    assert figures["to_min_s"] == 298.0
    hasty = scaling_figures.of_run([served()], [(0.0, 1), (10.0, 2), (109.0, 1), (113.0, 2)], RULES, 7.0)
    assert (hasty["early"], hasty["to_min_s"]) == (2, None)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        pytest.param({}, set(), id="all"),
        pytest.param({"most": 1}, {0}, id="it does not grow"),
        pytest.param({"early": 1}, {1}, id="too early"),
        pytest.param({"reversals_in_window": 2}, {2}, id="it swings"),
        pytest.param({"to_min_s": None}, {3}, id="never at the minimum"),
        pytest.param({"to_min_s": 213.0}, {3}, id="late at the minimum"),
        pytest.param({"not_ok": 1, "cut": 1}, {4}, id="cut"),
        pytest.param({"replica_s": 101.0, "p95_ttft_ms": 501.0}, {5}, id="worse in both"),
        pytest.param({"replica_s": 101.0, "p95_ttft_ms": 499.0}, set(), id="worse in one"),
    ],
)
def test_checks_say_what_is_not_met(changed: dict[str, Any], found: set[int]) -> None:
    """Each fault is found by its own check; faults of the other policy are none of ours."""
    assert missed([run(**changed), run("ongoing 2", early=3, not_ok=2, reversals_in_window=5)]) == found


def test_ratios_are_of_the_same_traffic_and_seed() -> None:
    """Twice the wait and half the cost of the other policy."""
    runs = [run(ttft=1.0, replica_s=50.0), run("ongoing 2"), run("ongoing 2", ttft=9.0, seed=1)]
    row = scaling_figures.compared(runs)["step"]["ongoing 2"]
    assert row["p95_ttft_ms"]["mean"] == pytest.approx(2.0)
    assert row["replica_s"]["mean"] == pytest.approx(0.5)


def test_later_requests_are_those_after_the_first_rise_and_its_start_up() -> None:
    """120 s after the rate is first at its highest; nothing where nobody comes then."""
    step, short, _, long, zero = autoscaling.traffics()
    assert [traffic.settled for traffic in (step, short, long, zero)] == [240.0, 120.0, 120.0, 600.0]
    records = [served(ttft=9.0, due=10.0), served(ttft=1.0, due=120.0), served(ttft=1.0, due=500.0)]
    assert scaling_figures.later(records, 120.0) == 1000.0
    assert scaling_figures.later(records, 600.0) is None


def test_traffic_follows_its_curve() -> None:
    """Every policy gets the same requests; there are none in a silence, and none after the end."""
    *_, zero = autoscaling.traffics()
    asked = autoscaling.requests(zero, 8192, 3)
    assert asked == autoscaling.requests(zero, 8192, 3)
    assert asked != autoscaling.requests(zero, 8192, 4)
    (busy, _), (silent, _), _ = zero.curve
    assert not [due for due, *_ in asked if busy <= due < busy + silent]
    assert busy + silent < asked[-1][0] < zero.seconds
    assert all(prompt + answer <= 8192 for _, prompt, answer in asked)


def test_bench_runs_and_writes_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short traffic has a run for each kind, policy and seed, and every check has a verdict."""
    first, *_, last = autoscaling.traffics(0.03)
    monkeypatch.setattr(autoscaling, "traffics", lambda scale: [first, last])
    out = tmp_path / "autoscaling.json"
    options = ["--seeds", "0", "--targets", "2", "--out", str(out)]
    assert main(["bench", "autoscaling", *options]) == 0
    result = json.loads(out.read_text())
    assert len(result["runs"]) == 2 * 3
    assert {run["policy"] for run in result["runs"]} == {"freeness", "ongoing 2", "Serve's defaults"}
    assert all(run["not_ok"] == 0 and run["to_min_s"] is not None for run in result["runs"])
    assert all(run["scaling"][-1][1] == run["least"] for run in result["runs"])
    assert len(result["checks"]) == 6
    assert result["seeds"] == [0]
    assert "what autoscaling on freeness promises" in " ".join(capsys.readouterr().out.split())


def test_live_results_have_a_file_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--live leaves the simulator's figures alone, and goes where --out says."""
    outs: list[Path] = []

    def ran(args: Any, console: Any) -> Path:
        outs.append(args.out)
        return outs[-1]

    monkeypatch.setattr(autoscaling_live, "run", ran)
    for more in ([], ["--out", str(tmp_path / "x.json")]):
        assert main(["bench", "autoscaling", "--live", *more]) == 0
    assert [out.name for out in outs] == ["autoscaling-live.json", "x.json"]
    assert outs[0].parent == parser().parse_args(["bench", "autoscaling"]).out.parent


def live(**changed: Any) -> dict[str, Any]:
    """Figures of a live run in which the second replica ends at 120 s, under two streams."""
    sizes = [(0.0, 1, 1), (20.0, 2, 1), (50.0, 2, 2), (112.0, 2, 1), (120.0, 1, 1)]
    given: dict[str, Any] = {
        "records": [served(due=t) for t in (1.0, 40.0, 90.0)],
        "streams": [served(due=95.0, latency=40.0), served(due=95.0, latency=45.0)],
        "sizes": sizes, "watched_s": 160.0, "span_s": 160.0, "moves": {"drain": {"done": 1}}, "load": 1.0,
    }  # fmt: skip
    return {"policy": "freeness", "traffic": "step", "seed": 0, **autoscaling_live.figures(**{**given, **changed})}


def test_sizes_of_a_live_fleet_are_noted_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first entry is the beginning; looks that find the same leave none."""
    monkeypatch.setattr(autoscaling_live, "LOOK_S", 0.001)
    seen = iter([(1, 1), (1, 1), (2, 1), (2, 2), (2, 2), (1, 1)])

    class Fleet:
        now = (0, 0)

        def named(self, part: str) -> list[int]:
            if (look := next(seen, None)) is None:
                raise EOFError
            self.now = look
            return [0] * look[0]

        async def serving(self) -> list[str]:
            return ["r"] * self.now[1]

    fleet: Any = Fleet()
    sizes: list[tuple[float, int, int]] = []
    with pytest.raises(EOFError):
        asyncio.run(autoscaling_live._watch(fleet, fleet, 0.0, sizes))
    assert [size for _, *size in sizes] == [[1, 1], [2, 1], [2, 2], [1, 1]]
    assert sizes[0][0] == 0.0 < sizes[1][0]


def test_live_figures_count_processes() -> None:
    """A replica costs from its start to the end of its process; streams count as open while it went."""
    figures = live()
    assert figures["replica_s"] == 20 + 2 * 100 + 40
    assert (figures["open"], figures["requests"], figures["cut"], figures["to_min_s"]) == (2, 5, 0, 28.0)
    assert live(streams=[served(due=95.0, latency=1.0)])["open"] == 0


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        pytest.param({}, True, id="all"),
        pytest.param({"streams": [replace(served(due=95.0, latency=40.0), error="x", times=(1.0,))]}, False, id="cut"),
        pytest.param({"streams": [served(due=95.0, latency=1.0)]}, False, id="none open"),
        pytest.param({"sizes": [(0.0, 1, 1)]}, False, id="it never grew"),
        pytest.param({"sizes": [(0.0, 1, 1), (20.0, 2, 2)]}, False, id="it never shrank"),
    ],
)
def test_a_live_run_must_have_shrunk_under_streams(changed: dict[str, Any], met: bool) -> None:
    """A run without a scale-down, or without streams in it, proves nothing; the other policy is held to it as well."""
    for policy in ("freeness", "ongoing 2"):
        *_, shrinks, punctual = autoscaling_live.checks([{**live(**changed), "policy": policy}], {})
        assert shrinks["met"] == met
        assert punctual["met"]
