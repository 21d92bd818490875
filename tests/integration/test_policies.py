"""One engine under memory pressure runs every scheduling policy in turn: the answers are the same, nothing is lost."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from app.model import default_model_path
from deployments.load_page import Figures, LoadPage
from deployments.scheduler import SchedulerSettings, use_policy_scheduler
from policies.scheduling import SCHEDULING

pytestmark = [pytest.mark.integration, pytest.mark.slow]

BLOCK, BLOCKS = 32, 12
# Six prompts of one or two blocks fill the cache; the answers need one more each, so some must make way.
PROMPTS = [
    [(7 * i + 13 * j) % 40_000 + 100 for j in range(size)] for i, size in enumerate((62, 20, 60, 100, 30, 61, 10, 63))
]
ANSWER = 20


@pytest.fixture(scope="module")
def page() -> Iterator[LoadPage]:
    """The page by which the policy is changed and the load is read."""
    made = LoadPage.create(f"tidegate-test-{uuid.uuid4().hex}")
    yield made
    made.close()


def start(page: LoadPage) -> AsyncLLM:
    """A float32 engine that begins with FCFS."""
    args = AsyncEngineArgs(
        model=str(default_model_path()),
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=6,
        block_size=BLOCK,
        kv_cache_memory_bytes=64 << 20,
        num_gpu_blocks_override=BLOCKS + 1,  # one is the null block
        gpu_memory_utilization=0.05,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    config = args.create_engine_config()
    use_policy_scheduler(config, SchedulerSettings({"name": "fcfs"}, page.name))
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


async def answer(engine: AsyncLLM, name: str, number: int) -> list[int]:
    """Greedy answer to one prompt; the policy may know its length."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=ANSWER,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"tidegate": {"ticket": number, "output_tokens": ANSWER}},
    )
    prompt = {"prompt_token_ids": PROMPTS[number]}
    outputs = [output async for output in engine.generate(prompt, params, f"{name}-{number}")]
    return list(outputs[-1].outputs[0].token_ids)


def figures(page: LoadPage) -> Figures:
    """Load of the engine now."""
    found = page.read()
    assert found is not None
    return found


async def emptied(page: LoadPage) -> Figures:
    """Load of the engine once its last step is reported."""
    for _ in range(200):
        if (found := figures(page)).running == found.waiting == 0 and found.free_blocks == BLOCKS:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"the engine is not empty: {figures(page)}")


async def play_all(page: LoadPage) -> tuple[dict[str, list[list[int]]], dict[str, int]]:
    """Answers and preemptions of each policy, changed from one to the next while the engine runs."""
    engine = start(page)
    answers, preemptions = {}, {}
    try:
        for name in ["fcfs", *(name for name in SCHEDULING.names() if name != "fcfs")]:
            spec = {"name": name}
            if "predictor" in SCHEDULING.parameters(name):
                spec["predictor"] = "oracle"
            version, before = page.set_policy(spec), figures(page).preemptions
            answers[name] = list(await asyncio.gather(*(answer(engine, name, i) for i in range(len(PROMPTS)))))
            after = await emptied(page)
            assert after.policy_version == version
            preemptions[name] = after.preemptions - before
    finally:
        engine.shutdown()
    return answers, preemptions


def test_every_policy_gives_the_answers_of_fcfs(page: LoadPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under KV pressure each policy's greedy float32 answers are FCFS's token by token, and every block comes back.

    FCFS had to preempt, so the comparison covers requests that were computed anew; Orca's rule never preempts.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    answers, preemptions = asyncio.run(play_all(page))
    assert all(len(tokens) == ANSWER for tokens in answers["fcfs"])
    assert {name: got == answers["fcfs"] for name, got in answers.items()} == dict.fromkeys(answers, True)
    assert preemptions["fcfs"] > 0
    assert preemptions["no_preempt"] == 0
