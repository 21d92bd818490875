"""`python -m loadgen advise`: the cheapest fleet, a Serve file that our check takes, a plain no where none is."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from app.config import check_file
from app.config.deployment import accelerator_names
from loadgen.advisor import page, serve_config, words
from loadgen.advisor.advise import Advice, advise
from loadgen.advisor.serve_config import ACCELERATORS, SOURCES, Machine
from loadgen.advisor.trial import (
    GivenUpError,
    Pair,
    Run,
    TierOutcome,
    Trial,
    Trials,
    Watch,
    alone,
    busiest,
    outcomes,
)
from loadgen.cli import main
from loadgen.metrics import RequestRecord
from loadgen.run.slo import Slo
from loadgen.simulator.cluster import Fleet, Job
from loadgen.simulator.engine import Shape
from loadgen.simulator.hardware import DEVICES, MODELS
from loadgen.simulator.step_cost import Fitted
from loadgen.workloads.make import make
from policies.balancing import BALANCING
from policies.scheduling import SCHEDULING

MODEL = MODELS["smollm2-135m"]
SHAPE = Shape(kv_blocks=64, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256)
COST = Fitted(step=0.1, prefill_token=0.0, prefill_request=0.0, attention_pair=0.0, decode=0.0, context_token=0.0)
PAIRS = [Pair({"name": "fcfs"}, {"name": "least_requests"}), Pair({"name": "larry"}, {"name": "sal"})]
JOBS = [Job(0.1 * i, 32, 10, tier=i % 2) for i in range(120)]  # 10 answer tokens are a second of one of four seats


def found(within: dict[int, float], replicas: int = 2, runs: int = 1) -> Trial:
    """A trial in which so many of each tier were within bounds."""
    tiers = {tier: TierOutcome(10, share, 1.0, 0.1, 2.0) for tier, share in within.items()}
    return Trial(PAIRS[0], replicas, (Run(tiers, 3600.0, 1000, 0),) * runs)


@pytest.fixture(scope="module")
def advice() -> Advice:
    """Advice on a small fleet: ten requests a second of a second each, four at a time on a replica."""
    fleet = Fleet(MODEL, SHAPE, COST, tiers={"headroom": [0.0, 0.0], "aging_s": [30.0, 30.0]})
    return advise(fleet, {0: JOBS, 1: JOBS}, {None: Slo(ttft=500)}, PAIRS, target=0.95, most=8, coarse=40)


def test_the_answer_is_enough_and_one_less_is_not(advice: Advice) -> None:
    """The best fleet keeps the target on both seeds; the trial with one replica less, which was run, does not."""
    best = advice.best
    assert best is not None
    assert best.worst >= 0.95
    assert len(best.runs) == 2
    assert sorted(best.runs[0].tiers) == [0, 1]
    assert 2 <= best.replicas < 8
    (less,) = [t for t in advice.fine if t.pair == best.pair and t.replicas == best.replicas - 1]
    assert not less.worst >= 0.95
    assert advice.coarse


def test_slower_steps_need_no_fewer_replicas(advice: Advice) -> None:
    """With steps that take longer the same policies need at least as many replicas."""
    assert advice.best is not None
    assert list(advice.slower) == [1.1, 1.25]
    assert all(count is None or count >= advice.best.replicas for count in advice.slower.values())


def test_the_page_shows_what_was_run(advice: Advice) -> None:
    """Each pair has its line, each plot its curve; nothing is loaded from elsewhere."""
    text = page.page(advice, PAIRS, ["Enough: <2>."], ["Roofline."])
    assert "Enough: &lt;2&gt;." in text
    assert all(str(pair) in text for pair in PAIRS)
    assert text.count("<svg") == 3
    assert "http" not in text.replace("http://www.w3.org", "")


def test_nothing_is_enough_and_why(advice: Advice) -> None:
    """Bounds that an idle replica misses are told from those that more replicas would keep."""
    fleet = Fleet(MODEL, SHAPE, COST)
    jobs = [Job(0.1 * i, 32, 10) for i in range(40)]
    asked: dict[str, Any] = {"pairs": PAIRS[:1], "target": 0.95, "most": 2, "coarse": 100}
    never = advise(fleet, {0: jobs}, {None: Slo(tpot=50)}, **asked)
    assert (never.best, never.nearest, never.fine) == (None, None, [])
    assert (never.alone, never.hopeless) == ({0: 0.0}, [0])
    machine = Machine("smollm2-135m", None, 1, SHAPE)
    said = " ".join(words.answer(never, machine, {None: Slo(tpot=50)}, None))
    assert "Nothing is enough" in said
    assert "No number of replicas would do for tier 0" in said
    more = advise(fleet, {0: jobs}, {None: Slo(ttft=300)}, **{**asked, "most": 1})
    assert more.best is None
    assert (more.alone, more.hopeless) == ({0: 1.0}, [])
    assert more.nearest is not None
    assert more.nearest.worst < 0.95
    assert "more replicas may do" in " ".join(words.answer(more, machine, {None: Slo(ttft=300)}, None))


def test_runs_are_given_up_when_they_have_missed() -> None:
    """A run on too few replicas ends when too many of a tier are late; asked for as a whole it says how many were."""
    fleet = Fleet(MODEL, SHAPE, COST, tiers={"headroom": [0.0, 0.0], "aging_s": [30.0, 30.0]})
    trials = Trials(fleet, {0: JOBS}, {0: Slo(ttft=500)}, 0.95, lambda text: None)
    early = trials.trial(PAIRS[0], 1, [0])
    assert 0 < early.played < 0.9
    assert math.isnan(early.worst)
    assert not trials.enough(PAIRS[0], 1, [0])
    whole = trials.trial(PAIRS[0], 1, [0], whole=True)
    assert whole.played == 1
    assert whole.worst < 0.95
    assert early.runs[0].seconds < whole.runs[0].seconds
    assert [trial.played for trial in trials.ran()] == [1]  # the whole one has replaced the other
    enough = trials.trial(PAIRS[0], 8, [0])
    assert (enough.played, enough.worst) == (1, trials.trial(PAIRS[0], 8, [0], whole=True).worst)


@pytest.mark.parametrize(("target", "missed", "given_up"), [(0.9, 1, False), (0.9, 2, True), (1.0, 1, True)])
def test_the_target_itself_is_enough(target: float, missed: int, given_up: bool) -> None:
    """Of ten requests one may miss 0.9 and none 1.0; those of tiers without bounds and of clients that left may."""
    jobs = [Job(0.0, 8, 4) for _ in range(10)] + [Job(0.0, 8, 4, tier=1)] * 5
    watch = Watch(jobs, {0: Slo(ttft=200)}, target)
    late = RequestRecord(due=0, sent=0, prompt_len=8, output_len=4, ttft=0.3, latency=0.4, status=200)
    left = RequestRecord(due=0, sent=0, prompt_len=8, output_len=0, ttft=0, latency=0, left="cancelled", error="x")
    for _ in range(5):
        watch(jobs[-1], late)
        watch(jobs[0], left)
    for _ in range(missed - 1):
        watch(jobs[0], late)
    with pytest.raises(GivenUpError) if given_up else nullcontext():
        watch(jobs[0], late)


def test_clients_that_leave_on_purpose_are_not_judged() -> None:
    """Cancelled requests count neither way, refused ones are misses, tiers without bounds are left out."""
    jobs = [Job(0.0, 8, 4, tier=t) for t in (0, 0, 0, 1)]
    good = RequestRecord(due=0, sent=0, prompt_len=8, output_len=4, ttft=0.1, latency=0.4, status=200)
    left = RequestRecord(due=0, sent=0, prompt_len=8, output_len=0, ttft=0, latency=0, left="cancelled", error="x")
    refused = RequestRecord(due=0, sent=0, prompt_len=8, output_len=0, ttft=0, latency=0, error="shed", status=429)
    outcome = outcomes(jobs, [good, left, refused, good], {0: Slo(ttft=200)})
    assert list(outcome) == [0]
    assert (outcome[0].judged, outcome[0].within) == (2, 0.5)


def test_the_busiest_stretch_and_jobs_alone() -> None:
    """The stretch with the most tokens a second begins at 0; lonely jobs come from each tier, far apart."""
    jobs = [Job(float(i), 10, 10, tier=i % 2) for i in range(10)]
    jobs += [Job(10 + 0.1 * i, 10, 10) for i in range(5)] + [Job(20.0, 10, 10)]
    chosen = busiest(jobs, 5)
    assert [round(job.due, 1) for job in chosen] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert busiest(jobs, 99) == jobs
    lonely = alone(jobs, 2)
    assert [job.tier for job in lonely] == [0, 0, 1, 1]
    assert [job.due for job in lonely] == [0.0, 1e5, 2e5, 3e5]


@pytest.mark.parametrize(
    ("name", "device"), [*itertools.product(("llama-3-8b",), DEVICES), *((m, None) for m in MODELS)]
)
def test_serve_files_pass_our_check(name: str, device: str | None, tmp_path: Path) -> None:
    """Every model and every device, with tiers and promises, makes a file that `python -m app.config` accepts."""
    file = tmp_path / "serve_config.yaml"
    shape = Shape(1000, 4096, block_size=16 if device else 32)
    machine = Machine(name, device, 2 if device else 1, shape, None if device else 1 << 28)
    pair = Pair({"name": "larry", "alpha": 2.0}, {"name": "tiered_sal"})
    slos = {0: Slo(ttft=500, tpot=50), None: Slo(e2el=9000)}
    file.write_text(serve_config.written(machine, pair, 3, slos, [5, 9, 1], "Enough: 3.\nRoofline."))
    check_file(file, "gpu" if device else "cpu")
    args = yaml.safe_load(file.read_text())["applications"][0]["args"]
    assert args["deployment_config"]["num_replicas"] == 3
    assert args["tiers"]["default"] == "tier1"
    assert args["tiers"]["levels"][0] == {"name": "tier0", "ttft_slo_s": 0.5, "tpot_slo_s": 0.05}
    assert args["tiers"]["levels"][1] == {"name": "tier1"}


def test_all_policies_can_be_written(tmp_path: Path) -> None:
    """Every policy can stand in a valid file; an oracle is not asked for, as nobody is one in production."""
    machine, file = Machine("llama-3-8b", "a100-80g", 1, SHAPE), tmp_path / "serve_config.yaml"
    balancers = itertools.cycle(BALANCING.names())
    for scheduling, balancing in zip(SCHEDULING.names(), balancers, strict=False):
        spec = {"name": scheduling}
        if "predictor" in SCHEDULING.parameters(scheduling):
            spec["predictor"] = "oracle"
        text = serve_config.written(machine, Pair(spec, {"name": balancing}), 1, {None: Slo(ttft=1)}, [1], "x")
        assert "oracle" not in text
        file.write_text(text)
        check_file(file, "gpu")


def test_names_are_known() -> None:
    """Every device has the name that Ray gives its node by the driver's name of the device, every model a source."""
    of_driver = {
        "a100-40g": "NVIDIA A100-SXM4-40GB",
        "a100-80g": "NVIDIA A100-SXM4-80GB",
        "h100-80g": "NVIDIA H100 80GB HBM3",
        "h200-141g": "NVIDIA H200",
        "l4-24g": "NVIDIA L4",
    }
    assert ACCELERATORS.keys() == DEVICES.keys()
    assert {n: NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(of_driver[n]) for n in DEVICES} == ACCELERATORS
    assert set(ACCELERATORS.values()) <= set(accelerator_names())
    assert SOURCES.keys() == MODELS.keys()


def test_words_of_cost_and_doubt() -> None:
    """The answer names fleet and price; what is shaky, calibrated or only a roofline is said."""
    machine = Machine("llama-3-8b", "a100-80g", 2, SHAPE)
    known = Advice(8, 0.9, best=found({0: 0.95}, runs=2), shaky=True, slower={1.1: 2, 1.25: None})
    said = " ".join(words.answer(known, machine, {None: Slo(ttft=1)}, 2.5))
    assert "2 replicas of llama-3-8b on 4 x a100-80g, fcfs + least_requests: 10.00 per hour" in said
    assert "10000.00 per million answer tokens" in said
    assert "with 3 replicas it does not hold" in said
    trust = " ".join(words.confidence(machine, None, None, known))
    assert "Roofline" in trust
    assert "10% longer, they would still be enough" in trust
    assert "8 replicas would not be enough" in trust
    assert "off by 4.0%" in " ".join(words.confidence(machine, "steps.json", 0.04, known))
    knowing = Pair({"name": "srpt", "predictor": "oracle"}, {"name": "sal"})
    assert "`srpt` knew the true length" in words.caveats([knowing, *PAIRS], None)[0]
    assert not words.caveats([knowing, *PAIRS], PAIRS[0])


def options(tmp_path: Path, *more: str) -> list[str]:
    """A command line on a small workload of two tiers, with fitted step times and two pairs of policies."""
    trace, cost = tmp_path / "trace.jsonl", tmp_path / "cost.json"
    fields = ("step", "prefill_token", "prefill_request", "attention_pair", "decode", "context_token")
    cost.write_text(json.dumps({"seconds": dict.fromkeys(fields, 0.0) | {"step": 0.05}, "unseen_error": 0.05}))
    shape = make(60, lengths_model="fixed:prompt=64,answer=8", arrivals="poisson:rate=20", tier_mix="1,1", tier_count=2)
    shape.save(trace)
    return [
        *("advise", "--trace", str(trace), "--model", "smollm2-135m", "--fitted", str(cost), "--kv-blocks", "32"),
        *("--max-num-seqs", "4", "--max-replicas", "6", "--seeds", "2", "--attain", "0.9"),
        *("--policies", "fcfs+p2c", "larry:alpha=2+tiered_sal", "--out", str(tmp_path / "out"), *more),
    ]


def test_step_times_that_are_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A JSON file that is no result of calibrate ends with status 1 and its name."""
    line = options(tmp_path, "--slo", "ttft=400")
    (tmp_path / "cost.json").write_text("[]")
    assert main(line) == 1
    assert "cost.json: is not a result of" in " ".join(capsys.readouterr().out.split())


def test_command_writes_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command: the answer with its confidence, figures, a page, and a Serve file for CPU; twice, the same."""
    line = options(tmp_path, "--slo", "0:ttft=400", "--slo", "1:ttft=2000")
    assert main(line) == 0
    out = tmp_path / "out"
    check_file(out / "serve_config.yaml", "cpu")
    first = json.loads((out / "advice.json").read_text())
    assert first["best"]["replicas"] == min(n for n in first["needs"].values() if n)
    assert "Calibrated" in first["confidence"][0]
    printed = capsys.readouterr().out
    assert "Enough:" in printed
    assert "<svg" in (out / "advice.html").read_text()
    assert main(line) == 0
    again = json.loads((out / "advice.json").read_text())
    assert all(again[key] == first[key] for key in ("answer", "confidence", "best", "needs", "attainment", "slower"))


def test_command_says_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bounds that an idle replica misses: status 3, nothing is searched, and no Serve file, not even an old one."""
    stale = tmp_path / "out" / "serve_config.yaml"
    stale.parent.mkdir()
    stale.write_text("old")
    assert main(options(tmp_path, "--slo", "tpot=10", "--max-replicas", "2")) == 3
    assert "Nothing is enough" in capsys.readouterr().out
    assert not stale.exists()
    found = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert (found["nearest"], found["attainment"], found["hopeless"]) == (None, [], [0, 1])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--slo", "5:ttft=1"], "no request of the workload is of tier 5"),
        (["--slo", "ttft=fast"], "give milliseconds"),
        (["--slo", "ttft=1", "--kv-blocks", "1"], "no request fits 32 tokens"),
    ],
)
def test_options_that_do_not_fit(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong is said in a line that names the option, without a traceback."""
    assert main(options(tmp_path, *more)) == 1
    assert message in " ".join(capsys.readouterr().out.split())
