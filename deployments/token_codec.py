"""Translates between vLLM's request objects and the wire: the one module that both ends of a stream share.

vLLM names used (contract-tested): SamplingParams and its msgpack codec, RequestOutput/CompletionOutput with flat
log-probabilities, EngineCoreOutput, FinishReason, LogprobsLists, LogprobsTensors, PrefillStats.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import torch
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.wire import Delta, Logprobs

_FINISH = {str(reason): reason for reason in FinishReason}
_encoder = MsgpackEncoder(size_threshold=1 << 62)  # never split off buffers: one message, one frame
_decoder = MsgpackDecoder(SamplingParams)


def encode_params(params: SamplingParams, ticket: int, *, begun: bool = False) -> bytes:
    """Encode resolved sampling parameters for a replica: ids only, one sequence, no text work there.

    Stop strings stay at the ingress (its detokenizer finds them); stop token ids travel. `flat_logprobs` keeps rows
    exact: sampled token first, duplicates included. `ticket` names the submission in the replica's load report. The
    answer's true length, if the client tells it (`vllm_xargs: {"tidegate_output_tokens": n}`), goes along for policies
    that are evaluated with an oracle. A sequence that has `begun` elsewhere has its prompt's log-probabilities.
    """
    wire = copy(params)
    if begun:
        wire.prompt_logprobs = None
    wire.stop = []
    wire.output_text_buffer_length = 0
    wire.detokenize = False
    wire.n = 1
    wire.output_kind = RequestOutputKind.DELTA
    wire.flat_logprobs = True
    wire.skip_clone = True
    extra = dict(params.extra_args or {})
    ours = {"ticket": ticket}
    oracle = extra.pop("tidegate_output_tokens", None)
    if isinstance(oracle, int) and oracle >= 1:
        ours["output_tokens"] = oracle
    wire.extra_args = {**extra, "tidegate": ours}
    (frame,) = _encoder.encode(wire)
    return bytes(frame)


def decode_params(frame: bytes) -> SamplingParams:
    """Decode what `encode_params` wrote."""
    return _decoder.decode(frame)


def to_delta(
    rid: str,
    epoch: int,
    start: int,
    output: RequestOutput,
    *,
    hop: int = 0,
    times: tuple[float, float] | None = None,
) -> Delta:
    """Turn one output of the engine (DELTA kind, one sequence) into a wire delta."""
    completion: CompletionOutput = output.outputs[0]
    first = start == 0
    return Delta(
        rid=rid,
        epoch=epoch,
        start=start,
        token_ids=list(completion.token_ids),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        logprobs=_rows(completion.logprobs) if completion.logprobs else None,
        prompt_logprobs=_rows(output.prompt_logprobs, skip=1) if output.prompt_logprobs else None,
        cached_tokens=output.num_cached_tokens if first else None,
        cache_creation_tokens=output.num_cache_creation_tokens if first else None,
        hop=hop,
        times=times,
    )


def _rows(flat: Any, skip: int = 0) -> Logprobs | None:
    """Flat log-probabilities from position `skip` on (position 0 of a prompt has none)."""
    if skip:
        flat = flat[skip:]
    if not len(flat):
        return None
    width = flat.end_indices[0] - flat.start_indices[0]
    return Logprobs(width, list(flat.token_ids), list(flat.logprobs), [flat.ranks[i] for i in flat.start_indices])


def to_engine_output(delta: Delta, first: bool) -> EngineCoreOutput:
    """Rebuild what vLLM's OutputProcessor expects from an EngineCore; `first` only for the client's first delta."""
    return EngineCoreOutput(
        request_id=delta.rid,
        new_token_ids=delta.token_ids,
        new_logprobs=_logprobs_lists(delta.logprobs) if delta.logprobs else None,
        new_prompt_logprobs_tensors=_logprobs_tensors(delta.prompt_logprobs) if delta.prompt_logprobs else None,
        finish_reason=_FINISH[delta.finish_reason] if delta.finish_reason else None,
        stop_reason=delta.stop_reason,
        prefill_stats=PrefillStats(
            num_cached_tokens=delta.cached_tokens or 0,
            num_cache_creation_tokens=delta.cache_creation_tokens or 0,
        )
        if first
        else None,
    )


def _logprobs_lists(rows: Logprobs) -> LogprobsLists:
    return LogprobsLists(
        np.asarray(rows.token_ids, np.int64).reshape(-1, rows.width),
        np.asarray(rows.logprobs, np.float32).reshape(-1, rows.width),
        np.asarray(rows.ranks, np.int64),
    )


def _logprobs_tensors(rows: Logprobs) -> LogprobsTensors:
    return LogprobsTensors(
        torch.tensor(rows.token_ids).reshape(-1, rows.width),
        torch.tensor(rows.logprobs).reshape(-1, rows.width),
        torch.tensor(rows.ranks),
    )
