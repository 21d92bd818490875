"""The policy scheduler inside a real engine: AsyncLLM, its EngineCore process and the default model on CPU."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from app.model import default_model_path
from deployments.load_page import Figures, LoadPage
from deployments.scheduler import SchedulerSettings, use_policy_scheduler

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPTS = [[(7 * i + 13 * j) % 40_000 + 100 for j in range(size)] for i, size in enumerate((700, 40, 350, 20, 600, 30))]


def start(policy: dict[str, object], page: LoadPage, tiers: dict[str, object] | None) -> AsyncLLM:
    """An engine of 48 KV blocks for two requests at a time, so that a queue forms."""
    args = AsyncEngineArgs(
        model=str(default_model_path()),
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=2,
        block_size=32,
        num_gpu_blocks_override=65,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    config = args.create_engine_config()
    use_policy_scheduler(config, SchedulerSettings(policy, page.name, tiers))
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


async def generate(engine: AsyncLLM, number: int) -> list[int]:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"tidegate": {"ticket": 1000 + number}},
    )
    prompt = {"prompt_token_ids": PROMPTS[number]}
    outputs = [output async for output in engine.generate(prompt, params, f"r{number}", priority=2 - number % 3)]
    return list(outputs[-1].outputs[0].token_ids)


def read(page: LoadPage) -> Figures:
    figures = page.read()
    assert figures is not None
    return figures


async def play(
    policy: dict[str, object], change_to: dict[str, object], tiers: dict[str, object] | None = None
) -> tuple[list[list[int]], list[Figures]]:
    """Answers under `policy` and the figures seen on the way; after a change of policy the answers are the same."""
    page = LoadPage.create(f"tidegate-test-{uuid.uuid4().hex}")
    engine = start(policy, page, tiers)
    try:
        seen = [read(page)]
        lowest = [asyncio.create_task(generate(engine, i)) for i in (0, 3)]
        work: asyncio.Future[list[list[int]]] | None = None
        while work is None or not work.done():
            await asyncio.sleep(0.002)
            if page.version != seen[-1].version:
                seen.append(read(page))
            if work is None and seen[-1].running == 2:  # the batch is full: the others find it so
                others = (generate(engine, i) for i in range(len(PROMPTS)) if i not in (0, 3))
                work = asyncio.gather(*lowest, *others)
        answers = work.result()
        assert sorted(page.admitted_since(0)[0]) == [1000 + i for i in range(len(PROMPTS))]
        version = page.set_policy(change_to)
        again = await asyncio.gather(*(generate(engine, i) for i in (0, 3, 1, 2, 4, 5)))
        seen.append(read(page))
        assert again == answers
        assert seen[-1].policy_version == version
        return answers, seen
    finally:
        engine.shutdown()
        page.close()


@pytest.mark.soak
def test_engine_runs_our_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy answers under larry equal those under fcfs, and the page follows the load up and back to idle."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    fcfs, _ = asyncio.run(play({"name": "fcfs"}, {"name": "larry", "alpha": 5}))
    larry, seen = asyncio.run(play({"name": "larry"}, {"name": "larry", "alpha": 500}))
    assert larry == fcfs
    assert all(len(answer) == 12 for answer in larry)
    assert [f.total_blocks for f in seen] == [64] * len(seen)
    assert max(f.running for f in seen) == 2
    assert max(f.waiting for f in seen) >= len(PROMPTS) - 3
    assert min(f.free_blocks for f in seen) < 45
    assert max(f.queued_tokens for f in seen) > 500
    for idle in (seen[0], seen[-1]):
        assert (idle.running, idle.waiting, idle.queued_tokens, idle.free_blocks) == (0, 0, 0, 64)


def test_engine_runs_tiers_over_prompts_in_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of the lowest tier fill the engine and make way; answers equal those of plain fcfs afterwards."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    tiers: dict[str, object] = {"headroom": [0.0] * 3, "aging_s": [None, 30.0, 30.0]}
    _, seen = asyncio.run(play({"name": "prefill_first"}, {"name": "fcfs"}, tiers))
    assert {len(f.waiting_by_tier) for f in seen} == {3}
    assert all(sum(f.waiting_by_tier) == f.waiting and sum(f.running_by_tier) == f.running for f in seen)
    assert any(f.waiting_by_tier[2] for f in seen)
    assert seen[-1].preemptions > 0
