"""Worker side of sequences that go on where another replica stopped, and of seeded sampling on CPU.

vLLM loads `WorkerExtension` into every worker process; importing this module there replaces two names of its V1 model
runner, both contract-tested: `gpu_model_runner.CachedRequestState` and `GPUModelRunner._update_states`. The V2 runner
keeps prompt and output apart by itself and seeds by position: it needs none of this.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from deployments.hints import extra_argument

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_update_states = gpu_model_runner.GPUModelRunner._update_states


class WorkerExtension:
    """Mixed into vLLM's worker class."""


class RewindableGenerator(torch.Generator):
    """A CPU generator that can take back its last draw.

    vLLM samples after each chunk of a prompt and takes the draw back by CUDA's offset. A CPU generator has none: a
    seeded request with a prompt of two chunks would end the engine.
    """

    def mark(self) -> None:
        """Remember the state before the step's draw."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Any number: only the way back counts."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Back to the state of the last `mark`."""
        self.set_state(self._before)


def request_state(**fields: Any) -> CachedRequestState:
    """The worker's state of a new request: with the tokens that it generated elsewhere, if it did."""
    state = CachedRequestState(**fields)
    state.output_token_ids.extend(extra_argument(state, "output") or ())
    if state.generator is not None and state.generator.device.type == "cpu":
        generator = RewindableGenerator(device="cpu")
        generator.set_state(state.generator.get_state())
        state.generator = generator
    return state


def skip_draws(generator: torch.Generator, count: int, vocabulary: int) -> None:
    """Advance a seeded request's generator by so many sampled tokens, as vLLM's sampler on that device draws them."""
    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (count,), generator=generator)
        return
    noise = torch.empty(vocabulary, device=generator.device)
    for _ in range(count):
        noise.exponential_(generator=generator)


@wraps(_update_states)
def update_states(runner: Any, scheduler_output: SchedulerOutput) -> Any:
    """Before the step's draws: skip those that a continued request has made elsewhere, mark the others."""
    result = _update_states(runner, scheduler_output)
    for new in scheduler_output.scheduled_new_reqs:
        state = runner.requests[new.req_id]
        if state.generator is not None and (drawn := len(extra_argument(state, "output") or ())):
            skip_draws(state.generator, drawn, runner.input_batch.vocab_size)
    for generator in runner.input_batch.generators.values():
        if isinstance(generator, RewindableGenerator):
            generator.mark()
    return result


gpu_model_runner.CachedRequestState = request_state
gpu_model_runner.GPUModelRunner._update_states = update_states
