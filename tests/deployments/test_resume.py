"""Sequences that began elsewhere: the scheduler's and the worker's part, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import gpu_model_runner

from deployments import worker

from .scheduler_rig import Driver, scheduler


def begun(name: str, prompt: int, output: list[int], max_tokens: int) -> Request:
    """A request that has generated `output` somewhere else."""
    extra = {"tidegate": {"output": output}}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
    return Request(name, [7] * prompt, params, None, arrival_time=0.0)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_it_generates_what_is_left(async_scheduling: bool) -> None:
    """Prompt and generated tokens are prefilled, the length counts from where it began, every block comes back."""
    driver = Driver(scheduler({"name": "larry"}, async_scheduling), async_scheduling)
    one, whole = begun("a", 40, [7] * 5, 8), begun("b", 40, [], 8)
    driver.run([(0, one), (0, whole)])
    assert one.num_prompt_tokens == 40
    assert (one.num_output_tokens, whole.num_output_tokens) == (8, 8)
    assert sum(step.get("a", 0) for step in driver.plan) == 40 + 5 + 2  # 45 known, and two of the three new ones
    assert driver.scheduler.figures().free_blocks == driver.scheduler.figures().total_blocks


def test_it_resumes_before_new_requests() -> None:
    """It counts as preempted, so that a client who has tokens does not wait behind a queue."""
    driver = Driver(scheduler({"name": "larry"}, seqs=1))
    driver.run([(0, begun("new", 10, [], 2)), (0, begun("begun", 10, [7, 7], 4))])
    assert driver.admitted == ["begun", "new"]


class Grammar:
    """A compiled grammar that takes or refuses tokens."""

    def __init__(self, takes: bool) -> None:
        self.takes, self.taken = takes, list[int]()

    def accept_tokens(self, name: str, tokens: list[int]) -> bool:
        self.taken += tokens
        return self.takes


@pytest.mark.parametrize("takes", [True, False])
def test_a_grammar_is_led_through_the_tokens(takes: bool) -> None:
    """Once, before the first step; a grammar that refuses them ends the request with an error, not the engine."""
    engine = scheduler({"name": "fcfs"})
    request = begun("a", 10, [5, 6], 4)
    grammar: Any = Grammar(takes)
    structured: Any = SimpleNamespace(grammar=grammar, reasoning_ended=True)
    request.structured_output_request = structured
    engine.add_request(request)
    for _ in range(2):
        engine._handle_blocked_waiting_request(request)
    assert grammar.taken == [5, 6]
    assert ("a" in engine.grammar_compile_error_reqs) is not takes
    engine.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert engine._replay == {}


def test_the_worker_knows_the_tokens() -> None:
    """vLLM's state of a new request starts with what it generated elsewhere."""
    assert gpu_model_runner.CachedRequestState is worker.request_state
    assert gpu_model_runner.GPUModelRunner._update_states is worker.update_states
    assert callable(StructuredOutputManager.accept_tokens)
    params = SamplingParams(extra_args={"tidegate": {"output": [5, 6]}})
    common: dict[str, Any] = {"req_id": "a", "prompt_token_ids": [1], "mm_features": [], "block_ids": ([],)}
    common |= {"num_computed_tokens": 0, "output_token_ids": []}
    state = gpu_model_runner.CachedRequestState(**common, sampling_params=params, generator=None)
    assert state.output_token_ids == [5, 6]
    seeded = torch.Generator().manual_seed(3)
    common["output_token_ids"] = []
    state = gpu_model_runner.CachedRequestState(**common, sampling_params=SamplingParams(), generator=seeded)
    assert state.output_token_ids == []
    assert isinstance(state.generator, worker.RewindableGenerator)
    assert torch.equal(torch.rand(4, generator=state.generator), torch.rand(4, generator=seeded))


def test_a_draw_can_be_taken_back() -> None:
    """As vLLM does after each chunk of a prompt, by an offset that CPU generators do not have."""
    generator = worker.RewindableGenerator()
    generator.manual_seed(1)
    generator.mark()
    first = torch.randint(0, 2**31, (1,), generator=generator)
    generator.set_offset(generator.get_offset() - 4)
    assert torch.equal(torch.randint(0, 2**31, (1,), generator=generator), first)


@pytest.mark.parametrize("count", [1, 2, 17])
def test_draws_made_elsewhere_are_skipped(count: int) -> None:
    """After the skip the generator gives what it would have given after so many single draws."""
    here, there = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    for _ in range(count):
        torch.randint(0, 2**31, (1,), generator=there)
    worker.skip_draws(here, count, 49_152)
    assert torch.equal(torch.randint(0, 2**31, (3,), generator=here), torch.randint(0, 2**31, (3,), generator=there))
