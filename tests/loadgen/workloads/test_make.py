"""Making workloads: reproducible, each aspect independent of the others, sessions with shared prefixes, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.workloads import readers
from loadgen.workloads.make import cancelling, make, tiered, with_deadline
from loadgen.workloads.rows import BadTrace
from loadgen.workloads.texts import texts
from loadgen.workloads.workload import Request, Workload, describe


def test_one_seed_gives_one_workload() -> None:
    """The same arguments give the same requests, another seed others."""
    a, b, c = (make(50, arrivals="code:rate=5", tier_mix="enterprise", seed=seed) for seed in (1, 1, 2))
    assert a.requests == b.requests
    assert a.digest == b.digest != c.digest


def test_aspects_draw_apart() -> None:
    """Another arrival process leaves lengths and tiers as they were; tiers and cancelling leave all else."""
    plain = make(40, arrivals="poisson:rate=1")
    other = make(40, arrivals="functions:rate=45", tier_mix="uniform", cancel_rate=0.5)
    assert [(r.prompt_tokens, r.output_tokens) for r in plain.requests] == [
        (r.prompt_tokens, r.output_tokens) for r in other.requests
    ]
    assert [r.due for r in tiered(plain, "gaussian", 4).requests] == [r.due for r in plain.requests]


def test_shares_of_tiers_and_cancels() -> None:
    """Tiers follow the mix, and the asked share of clients leaves after the asked mean delay."""
    workload = make(5_000, tier_mix="1,2,1", tier_count=3, cancel_rate=0.2, cancel_delay=3.0)
    tiers = np.bincount([r.tier or 0 for r in workload.requests]) / 5_000
    assert tiers == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    delays = [r.cancel_after for r in workload.requests if r.cancel_after is not None]
    assert len(delays) / 5_000 == pytest.approx(0.2, abs=0.02)
    assert np.mean(delays) == pytest.approx(3.0, rel=0.1)


def test_a_deadline_of_its_own_is_kept() -> None:
    """`with_deadline` sets it where there is none."""
    workload = Workload((Request(due=0, prompt_tokens=1, deadline=3), Request(due=1, prompt_tokens=1)))
    assert [r.deadline for r in with_deadline(workload, 9).requests] == [3, 9]


def test_agents_send_what_came_before() -> None:
    """Turns of a session share all blocks of the turn before, sessions of one kind the system prompt; means as told."""
    workload = make(4_000, lengths_model="agents", arrivals="poisson:rate=2")
    found = describe(workload)
    assert found["prompt_tokens"]["mean"] == pytest.approx(8596, rel=0.2)
    assert found["output_tokens"]["mean"] == pytest.approx(182, rel=0.1)
    assert found["block_hit_share"] > 0.6
    last: dict[str, Request] = {}
    for request in workload.requests:
        assert request.session is not None
        before = last.get(request.session)
        if before is not None:
            assert request.blocks[: len(before.blocks)] == before.blocks
            assert request.prompt_tokens >= before.prompt_tokens + before.output_tokens
        last[request.session] = request
    system = {r.blocks[0] for r in workload.requests}
    assert len(system) == 4


def test_agents_fit_a_small_window() -> None:
    """Scaled to 1024 tokens, every turn fits and still has shared blocks."""
    workload = make(500, lengths_model="agents", context=1024, tier_mix="uniform")
    assert max(r.prompt_tokens + r.output_tokens for r in workload.requests) <= 1024
    assert all(len(r.blocks) * workload.block_tokens <= r.prompt_tokens for r in workload.requests)
    by_session = {(r.session, r.tier) for r in workload.requests}
    assert len(by_session) == len({session for session, _ in by_session})


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, 30),
    model=st.sampled_from(["chat", "code", "agents", "tier-zipf", "fixed"]),
    context=st.sampled_from([None, 64, 512]),
    cancel=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_files_keep_everything(
    n: int, model: str, context: int | None, cancel: float, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A workload that is written and read is the same, and has as many requests as asked for."""
    made = make(
        n, lengths_model=model, context=context, cancel_rate=cancel, tier_mix="enterprise", deadline=5, seed=seed
    )
    path = tmp_path_factory.mktemp("w") / "w.jsonl"
    made.save(path)
    read = readers.read(path)
    assert read.requests == made.requests
    assert len(read.requests) == n
    assert (read.about, read.block_tokens, read.context) == (made.about, made.block_tokens, made.context)
    assert read.digest == made.digest


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: lines[:-1], "2 requests, line 1 announces 3"),
        (lambda lines: [*lines[:2], b'{"due":-1,"prompt_tokens":1}', lines[3]], "line 3: Expected `float` >= 0"),
        (lambda lines: [*lines[:2], b'{"due":1,"promt_tokens":1}', lines[3]], "line 3:.*promt_tokens"),
        (lambda lines: [*lines[:2], b'{"due":1,"prompt_', lines[3]], "line 3"),
        (lambda lines: [lines[0].replace(b'"workload":1', b'"workload":9'), *lines[1:]], "format 9"),
    ],
)
def test_broken_files_are_named(change: object, complaint: str, tmp_path: Path) -> None:
    """A cut file, a wrong or misspelt field, broken JSON and another format are named with their line."""
    path = tmp_path / "w.jsonl"
    make(3).save(path)
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))  # type: ignore[operator]
    with pytest.raises(BadTrace, match=complaint):
        readers.read(path)


def test_prompt_texts() -> None:
    """One word a token, less what the template adds; equal leading blocks give equal leading words; seeds differ."""
    workload = Workload(
        (
            Request(due=0, prompt_tokens=20, blocks=(1, 2)),
            Request(due=0, prompt_tokens=20, blocks=(1, 3)),
            Request(due=0, prompt_tokens=6, blocks=(1,)),
            Request(due=0, prompt_tokens=7),
            Request(due=0, prompt_tokens=7, text="as it is"),
            Request(due=0, prompt_tokens=7, body={"messages": []}),
            Request(due=0, prompt_tokens=1),
        ),
        block_tokens=8,
    )
    made = list(texts(workload, seed=5, less=2))
    words = [text.split() if text is not None else [] for text in made]
    assert [len(w) for w in words] == [18, 18, 4, 5, 3, 0, 1]
    assert words[0][:8] == words[1][:8]
    assert words[0][8:16] != words[1][8:16]
    assert words[0][:4] == words[2]
    assert made[4] == "as it is"
    assert made == list(texts(workload, seed=5, less=2))
    assert made != list(texts(workload, seed=6, less=2))


def test_requests_stand_in_order() -> None:
    """Requests that are not sorted by time are refused."""
    with pytest.raises(ValueError, match="order"):
        Workload((Request(due=2, prompt_tokens=1), Request(due=1, prompt_tokens=1)))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: make(0), "requests: 0"),
        (lambda: cancelling(make(1), 1.5, 1.0), "cancel: rate 1.5"),
        (lambda: with_deadline(make(1), 0), "deadline: 0"),
        (lambda: make(1, tier_mix="odd"), "mix: 'odd'"),
    ],
)
def test_impossible_wishes_are_named(call: object, complaint: str) -> None:
    """What cannot be made is refused by the name of the argument."""
    with pytest.raises(ValueError, match=complaint):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    "models",
    [
        {"lengths_model": "fixed:prompt=1e30"},
        {"lengths_model": "tier-zipf:theta=1e9"},
        {"lengths_model": "tier-zipf:theta=5000"},
        {"lengths_model": "agents:turns=1e300"},
        {"arrivals": "poisson:rate=1e-300"},
        {"arrivals": "poisson:rate=1e300"},
        {"arrivals": "gamma:rate=5,cv=1e200"},
        {"arrivals": "square:low=1,high=5,period=1e-9"},
        {"arrivals": "square:low=1,high=5,period=1e-6"},
        {"arrivals": "code:rate=1,on=1e-6,off=1e-6"},
        {"arrivals": "chat:rate=1e-6"},
    ],
    ids=str,
)
def test_numbers_beyond_all_reason_are_refused(models: dict[str, str]) -> None:
    """A parameter with which floats or memory would overflow is a ValueError that says which."""
    with pytest.raises(ValueError, match=r"lengths: |arrivals: |curve: |can be drawn"):
        make(200, **models)  # type: ignore[arg-type]  # names of models


def test_a_ramp_of_thirty_years_is_a_ramp() -> None:
    """A long ramp has no more pieces than memory bears."""
    assert len(make(20, arrivals="ramp:rate=1,to=3,seconds=1e9").requests) == 20
