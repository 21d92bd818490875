"""What a move cannot carry, by name: such a request stays where it is and is counted under the name.

Why, with vLLM 0.32: blocks are copied as they lie, in one group of full-attention KV, and to the destination a moved
request is a preempted one that resumes, so that all its state must be in token ids, blocks and the sampler's seed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Traits:
    """What a request, its engine and the pair of engines have of this; each field's name is the refusal's name.

    multimodal: block hashes need features that do not travel. prompt_embeds: the prompt has no ids. pooling: no decode
    to go on with. other_attention: sliding-window, Mamba or hybrid caches, more than one KV group. pipeline_parallel:
    layers are spread over stages. kv_connector: it keeps accounts of blocks of its own. lora: the adapter may not be
    loaded there. parallel_sampling: n > 1 within one engine request. prompt_logprobs: not delivered yet. speculative:
    draft state. unlike_engine: model, dtype, block size, tensor parallelism or version differ, so bytes of a block mean
    something else, or the engine's blocks cannot be reached.
    """

    multimodal: bool = False
    prompt_embeds: bool = False
    pooling: bool = False
    other_attention: bool = False
    pipeline_parallel: bool = False
    kv_connector: bool = False
    lora: bool = False
    parallel_sampling: bool = False
    prompt_logprobs: bool = False
    speculative: bool = False
    unlike_engine: bool = False


REFUSALS = tuple(field.name for field in fields(Traits))


def refusal(traits: Traits) -> str | None:
    """The first reason why a request with these traits must stay, None if it can move."""
    return next((name for name in REFUSALS if getattr(traits, name)), None)
