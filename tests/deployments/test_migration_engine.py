"""Moves between two real engines: the answers equal those that stayed, and nothing is left behind on either side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.migration.engine_kv import Gone, KVRefused, NotRunning
from tests.deployments.move_rig import LEASE_S, SCHEMA, Sequence, Side, all_free, move, prompt, whole

pytestmark = [pytest.mark.integration, pytest.mark.slow]

Pair = Callable[[Callable[[Side, Side], Coroutine[Any, Any, None]]], None]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7},
    "seeded-penalties": {"temperature": 1.0, "seed": 9, "presence_penalty": 1.5, "frequency_penalty": 0.4},
    "top-p": {"temperature": 1.0, "seed": 10, "top_p": 0.8, "top_k": 40},
    "repetition": {"repetition_penalty": 1.2, "presence_penalty": 1.0},
    "logprobs": {"logprobs": 3},
    "min-tokens": {"ignore_eos": False, "min_tokens": 24},
    "json": {"ignore_eos": False, "schema": SCHEMA},
}


@asynccontextmanager
async def engines(cores: tuple[str, str] = ("0", "1"), **arguments: Any) -> AsyncIterator[tuple[Side, Side]]:
    sides: list[Side] = []
    try:
        for core in cores:
            sides.append(await Side.start(core, **arguments))
        yield sides[0], sides[1]
    finally:
        for side in sides:
            side.engine.shutdown()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Runs a scenario on the two engines of this module and sees to it that it left nothing behind."""
    with asyncio.Runner() as runner:
        context = engines()
        a, b = runner.run(context.__aenter__())

        def run(scenario: Callable[[Side, Side], Coroutine[Any, Any, None]]) -> None:
            async def clean() -> None:
                await scenario(a, b)
                await all_free(a, b)

            runner.run(clean())

        yield run
        runner.run(context.__aexit__(None, None, None))


def equal(moved: Sequence, stayed: Sequence) -> None:
    assert moved.tokens == stayed.tokens
    assert moved.finish_reason == stayed.finish_reason
    assert moved.logprobs == stayed.logprobs


async def moved_at(cut: int, a: Side, b: Side, tokens: list[int], **params: Any) -> Sequence:
    """A sequence that moves after `cut` tokens; its first step on B computes one token."""
    sequence = Sequence(tokens, **params)
    sequence.begin(a)
    await sequence.grow_to(cut)
    await move(sequence, a, b)
    await sequence.end()
    assert await b.first_step(sequence.request_id) == 1
    return sequence


def test_the_engines_know_that_they_are_alike(pair: Pair) -> None:
    """Two engines of the same settings can exchange blocks; all layers' bytes are counted."""

    async def scenario(a: Side, b: Side) -> None:
        assert a.kv.fingerprint == b.kv.fingerprint
        assert a.kv.block_bytes == b.kv.block_bytes == 30 * 2 * 3 * 64 * 4 * 32

    pair(scenario)


def test_moved_answers_equal_those_that_stayed(pair: Pair) -> None:
    """Every way of sampling, eight moves at once, over a hop in the middle: tokens, log-probabilities and end."""

    async def scenario(a: Side, b: Side) -> None:
        stayed = {name: Sequence(prompt(60, i), max_tokens=48, **case) for i, (name, case) in enumerate(CASES.items())}
        for sequence in stayed.values():
            sequence.begin(a)
        await asyncio.gather(*(sequence.end() for sequence in stayed.values()))
        moved = await asyncio.gather(
            *(moved_at(9, a, b, prompt(60, i), max_tokens=48, **case) for i, case in enumerate(CASES.values()))
        )
        for sequence, reference in zip(moved, stayed.values(), strict=True):
            equal(sequence, reference)

    pair(scenario)


def test_five_hops(pair: Pair) -> None:
    """To and fro, by stages and in one piece, seeded with penalties: as if it had never moved."""

    async def scenario(a: Side, b: Side) -> None:
        params: dict[str, Any] = {"max_tokens": 90, "temperature": 0.9, "seed": 3, "presence_penalty": 1.0}
        stayed = await whole(a, prompt(300), **params)
        sequence = Sequence(prompt(300), **params)
        sequence.begin(a)
        for hop, (source, destination) in enumerate([(a, b), (b, a)] * 2 + [(a, b)], start=1):
            await sequence.grow_to(12 * hop)
            await move(sequence, source, destination, stage=4 * (hop % 2))
            assert await destination.first_step(sequence.request_id) == 1
        await sequence.end()
        equal(sequence, stayed)

    pair(scenario)


def test_park_and_unpark(pair: Pair) -> None:
    """A request that was parked, beside another one and alone, goes on on the same engine with the same tokens."""

    async def scenario(a: Side, b: Side) -> None:
        params: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "seed": 3}
        stayed = await whole(a, prompt(100), **params)
        for company in (True, False):
            sequence, other = Sequence(prompt(100), **params), Sequence(prompt(40, 1), max_tokens=40)
            sequence.begin(a)
            if company:
                other.begin(a)
            for cut in (5, 20):
                await sequence.grow_to(cut)
                parked = await a.kv.park(sequence.request_id, 0, LEASE_S)
                await sequence.grow_to(len(parked.output))
                if company:
                    await other.grow_to(len(other.tokens) + 3)
                else:
                    await asyncio.sleep(0.1)  # the engine has nothing to do
                assert len(sequence.tokens) == len(parked.output)
                with pytest.raises(NotRunning):
                    await a.kv.export(sequence.request_id, 0, 1)
                for _ in range(2):
                    await a.kv.unpark(sequence.request_id)
            await sequence.end()
            equal(sequence, stayed)
            if company:
                await other.end()

    pair(scenario)


def test_leases_end_on_idle_engines(pair: Pair) -> None:
    """A request parked for too long goes on, a reservation falls back, and so do regions of segments."""

    async def scenario(a: Side, b: Side) -> None:
        sequence = Sequence(prompt(100), max_tokens=30)
        sequence.begin(a)
        await sequence.grow_to(5)
        await b.kv.reserve("m", 10, 0.3)
        parked = await a.kv.park(sequence.request_id, 0, 0.3)
        b.kv.adoption("m", parked.computed, parked.first, parked.copied, parked.parts)  # of a request that never comes
        assert len(b.kv._landing) == 1
        await sequence.end()
        await all_free(a)
        async with asyncio.timeout(20):
            while b.kv._landing:
                await asyncio.sleep(0.05)
        with pytest.raises(KVRefused, match="expired"):
            await b.kv.write("m", 0, parked.copied, parked.parts, LEASE_S)

    pair(scenario)


def test_a_lost_reservation_costs_time_only(pair: Pair) -> None:
    """B computes all anew and the answer is the same."""

    async def scenario(a: Side, b: Side) -> None:
        stayed = await whole(a, prompt(200), max_tokens=30)
        sequence = Sequence(prompt(200), max_tokens=30)
        sequence.begin(a)
        await sequence.grow_to(7)
        await move(sequence, a, b, lost=True)
        await sequence.end()
        equal(sequence, stayed)
        assert await b.first_step(sequence.request_id) > 200

    pair(scenario)


def test_what_ended_or_was_preempted_is_told(pair: Pair) -> None:
    """Gone and NotRunning, nothing about another request; a preempted one moves without KV and ends right."""

    async def scenario(a: Side, b: Side) -> None:
        stayed = await whole(a, prompt(100), max_tokens=30)
        sequence = Sequence(prompt(100), max_tokens=30)
        sequence.begin(a)
        await sequence.grow_to(6)
        (candidate,) = await a.kv.candidates()
        assert (candidate.request_id, candidate.place, candidate.refused) == (sequence.request_id, "decode", None)
        own = a.kv._own(sequence.request_id)
        parked = await a.kv._call("preempt_and_park", request=own, lease_s=LEASE_S)
        assert (parked["held"], parked["computed"], parked["copied"]) == (0, 0, 0)
        await sequence.grow_to(len(parked["output"]))
        old, sequence.hop = sequence.request_id, 1
        await b.kv.reserve("m", 0, LEASE_S)
        entries = b.kv.adoption("m", parked["computed"], 0, 0, ())
        sequence.begin(b, {"output": parked["output"], **entries})
        await a.engine.abort(old)
        await sequence.end()
        equal(sequence, stayed)
        for act in (a.kv.export(old, 0, 1), a.kv.park(old, 0, LEASE_S)):
            with pytest.raises(Gone):
                await act
        await a.kv.unpark(old)
        await a.kv.release("never")

    pair(scenario)


def model_of_even_heads(folder: Path) -> Path:
    """A small model of random weights; the default one's three KV heads cannot be halved."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "length", [pytest.param(50, marks=pytest.mark.soak), 500, pytest.param(2000, marks=pytest.mark.soak)]
)
def test_lengths_and_cuts(pair: Pair, length: int) -> None:
    """Short and long prompts, moved after 1, 17 and 64 tokens, greedy and seeded: one token in B's first step."""

    async def scenario(a: Side, b: Side) -> None:
        for params in ({}, {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.5}):
            stayed = Sequence(prompt(length), max_tokens=80, **params)
            stayed.begin(a)
            await stayed.end()
            for cut in (1, 17, 64):
                equal(await moved_at(cut, a, b, prompt(length), max_tokens=80, **params), stayed)

    pair(scenario)


def test_moves_under_kv_pressure() -> None:
    """Engines of 40 blocks, full: some moves are refused, some requests preempted, every answer is right."""

    async def play() -> None:
        async with engines(blocks=40, max_model_len=1024) as (a, b):
            prompts = [prompt(130, seed) for seed in range(10)]
            stayed = [Sequence(tokens, max_tokens=120) for tokens in prompts]
            for sequence in stayed:
                sequence.begin(a)
            await asyncio.gather(*(sequence.end() for sequence in stayed))
            assert await a.engine.reset_prefix_cache()
            before = (await a.look())["preemptions"]
            sequences = [Sequence(tokens, max_tokens=120) for tokens in prompts]
            for i, sequence in enumerate(sequences):
                sequence.begin((a, b)[i % 2])
            refused = done = 0
            for round_ in range(3):
                for i, sequence in enumerate(sequences):
                    source, destination = (a, b) if (i + sequence.hop) % 2 == 0 else (b, a)
                    await sequence.grow_to(20 + 30 * round_)
                    try:
                        await move(sequence, source, destination)
                        done += 1
                    except (KVRefused, NotRunning, Gone):
                        refused += 1
                        for side, name in ((source, sequence.request_id), (destination, f"{sequence.request_id}-move")):
                            await side.kv.unpark(name)
                            await side.kv.release(name)
            await asyncio.gather(*(sequence.end() for sequence in sequences))
            for sequence, reference in zip(sequences, stayed, strict=True):
                equal(sequence, reference)
            seen = [await side.look() for side in (a, b)]
            assert done >= 3
            assert refused + sum(look["preemptions"] for look in seen) > before
            await all_free(a, b)

    asyncio.run(play())


def test_a_dead_engine_is_told_at_once() -> None:
    """Calls under way and later ones end with EngineDeadError; those of the other engine go on."""
    from vllm.v1.engine.exceptions import EngineDeadError

    async def play() -> None:
        async with engines() as (a, b):
            sequence = Sequence(prompt(100), max_tokens=60)
            sequence.begin(a)
            await sequence.grow_to(5)
            await b.kv.reserve("m", 8, LEASE_S)
            parked = await a.kv.park(sequence.request_id, 0, LEASE_S)
            for process in b.engine.engine_core.resources.engine_manager.processes:
                process.kill()
            for act in (b.kv.write("m", 0, parked.copied, parked.parts, LEASE_S), b.kv.reserve("n", 1, LEASE_S)):
                with pytest.raises(EngineDeadError):
                    await asyncio.wait_for(act, 30)
            await a.kv.unpark(sequence.request_id)
            await sequence.end()
            assert len(sequence.tokens) == 60
            await all_free(a)

    asyncio.run(play())


def test_tensor_parallel_engines_exchange_blocks(tmp_path: Path) -> None:
    """Two engines of two workers each: a segment per rank, the same tokens."""

    async def play() -> None:
        model = str(model_of_even_heads(tmp_path))
        arguments = {"model": model, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        async with engines(("0|1", "0|1"), skip_tokenizer_init=True, **arguments) as (a, b):
            assert a.kv.fingerprint == b.kv.fingerprint
            for params in ({}, {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.4}):
                stayed = await whole(a, prompt(300), max_tokens=60, **params)
                sequence = Sequence(prompt(300), max_tokens=60, **params)
                sequence.begin(a)
                await sequence.grow_to(20)
                await move(sequence, a, b, stage=4)
                await sequence.end()
                equal(sequence, stayed)
                assert await b.first_step(sequence.request_id) == 1
            await all_free(a, b)

    asyncio.run(play())
