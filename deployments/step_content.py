"""What is in a scheduled step, as times are modelled by it: the same in an engine's log and in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Step(NamedTuple):
    """What is in one step.

    `attention`: pairs of tokens that prefill attention multiplies: sum over the chunks of length x mean context.
    `context_tokens`: KV tokens that the decodes read, the new one included.
    """

    prefill_tokens: int = 0
    prefill_requests: int = 0
    attention: float = 0.0
    decodes: int = 0
    context_tokens: int = 0


def content_of(requests: Mapping[str, Any], scheduled: Mapping[str, int]) -> tuple[Step, list[bool]]:
    """What a step consists of, and for each request in it whether it samples a token.

    `requests`: the scheduler's, after `schedule()`, which counts the step's tokens as computed. `scheduled`: tokens by
    request. One token behind the prompt is a decode, also where it ends the prefill after a preemption.
    """
    prefill_tokens = prefill_requests = decodes = context = 0
    attention = 0.0
    sampled = []
    for name, tokens in scheduled.items():
        request = requests[name]
        end, samples = request.num_computed_tokens, not request.is_prefill_chunk
        sampled.append(samples)
        if tokens == 1 and samples and end > request.num_prompt_tokens:
            decodes += 1
            context += end
        else:
            prefill_requests += 1
            prefill_tokens += tokens
            attention += tokens * (end - tokens / 2)
    return Step(prefill_tokens, prefill_requests, attention, decodes, context), sampled
