"""What crosses the wire is what vLLM meant: parameters, tokens and log-probabilities survive both translations."""

from __future__ import annotations

import functools
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike, get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from app.model import default_model_path
from deployments.token_codec import decode_params, encode_params, to_delta, to_engine_output
from deployments.wire import Delta

TEXT = "Hi 🍕🦄 👩‍👩‍👧‍👦 日本語 ภาษาไทย é naïve — done 中文字符 🏳️‍🌈!"
#: What the replica must not do itself; everything else travels unchanged.
TEXT_WORK = {"stop", "output_text_buffer_length", "detokenize", "n", "output_kind", "flat_logprobs", "skip_clone"}


@functools.cache
def tokenizer() -> TokenizerLike:
    """Tokenizer of the default model."""
    return get_tokenizer(str(default_model_path()))


def fields(params: SamplingParams) -> dict[str, Any]:
    """All attributes of the parameters, private ones included."""
    return {name: getattr(params, name) for name in params.__struct_fields__}


@pytest.mark.parametrize(
    "given_params",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 2**40 + 1},
        {"stop": ["日本", "\n\n"], "include_stop_str_in_output": True, "max_tokens": 7, "min_tokens": 3},
        {"stop_token_ids": [2, 17, 49151], "ignore_eos": True, "skip_special_tokens": False},
        {"bad_words": ["foo", "naïve bar"]},
        {"logit_bias": {5: -100.0, 49151: 12.5}, "allowed_token_ids": [5, 6, 7]},
        {"presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 1.3},
        {"logprobs": 5, "prompt_logprobs": 2},
        {"structured_outputs": StructuredOutputsParams(json={"type": "object", "properties": {"é": {"type": "null"}}})},
        {"structured_outputs": StructuredOutputsParams(regex=r"\d{3}-[a-zé]+")},
        {"structured_outputs": StructuredOutputsParams(choice=["yes", "nö"])},
        {"structured_outputs": StructuredOutputsParams(json_object=True, disable_any_whitespace=True)},
        {"structured_outputs": StructuredOutputsParams(grammar='root ::= "a" | "b"')},
        {"extra_args": {"answer": 42}, "n": 3, "output_kind": RequestOutputKind.FINAL_ONLY},
    ],
    ids=lambda p: "+".join(p) or "defaults",
)
def test_params_survive(given_params: dict[str, Any]) -> None:
    """All sampling parameters arrive as they were, but for those whose work is done at the ingress."""
    params = SamplingParams(**given_params)
    params.update_from_tokenizer(tokenizer())
    before = repr(fields(params))
    arrived = decode_params(encode_params(params, 77))
    assert repr(fields(params)) == before, "the caller's parameters must not change"
    ours, theirs = fields(params), fields(arrived)
    assert theirs.pop("extra_args") == {**(ours.pop("extra_args") or {}), "tidegate": {"ticket": 77}}
    assert {k: v for k, v in theirs.items() if k not in TEXT_WORK} == {
        k: v for k, v in ours.items() if k not in TEXT_WORK
    }
    assert (arrived.stop, arrived.detokenize, arrived.n) == ([], False, 1)
    assert arrived.output_kind is RequestOutputKind.DELTA
    assert arrived.flat_logprobs


def request(rid: str, prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    """A request as an OutputProcessor takes it."""
    return EngineCoreRequest(
        request_id=rid,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=rid,
    )


class Reader:
    """One OutputProcessor with one request, as in an engine's front end."""

    def __init__(self, prompt: list[int], params: SamplingParams, text: str | None) -> None:
        self._processor = OutputProcessor(tokenizer(), log_stats=False, stream_interval=1)
        self._collector = RequestOutputCollector(params.output_kind, "r")
        self._processor.add_request(request("r", prompt, params), text, None, 0, self._collector)

    def feed(self, output: EngineCoreOutput) -> RequestOutput | None:
        """What the client gets of one engine output."""
        self._processor.process_outputs([output])
        answer = self._collector.get_nowait()
        assert answer is None or isinstance(answer, RequestOutput)
        return answer


def seen(output: RequestOutput) -> dict[str, Any]:
    """Everything of an output that a client can see."""
    (sequence,) = output.outputs
    return {
        "prompt_logprobs": output.prompt_logprobs,
        "cached": output.num_cached_tokens,
        "finished": output.finished,
        "text": sequence.text,
        "ids": list(sequence.token_ids),
        "logprobs": sequence.logprobs,
        "cumulative": sequence.cumulative_logprob,
        "reasons": (sequence.finish_reason, sequence.stop_reason),
    }


def logprob_rows(rng: random.Random, ids: list[int], top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Made-up log-probabilities of tokens: the token first, then `top` others, which may repeat it."""
    vocabulary = len(tokenizer().get_vocab())
    columns = [[token] + [rng.choice([token, rng.randrange(vocabulary)]) for _ in range(top)] for token in ids]
    values = [[-rng.random() * 20 for _ in range(top + 1)] for _ in ids]
    ranks = [rng.randrange(1, vocabulary) for _ in ids]
    return np.asarray(columns, np.int64), np.asarray(values, np.float32), np.asarray(ranks, np.int64)


def engine_outputs(rng: random.Random, prompt: list[int], ids: list[int], params: SamplingParams) -> list[Any]:
    """One sequence as an EngineCore would send it: cut at random, with log-probabilities where they are asked for."""
    outputs = []
    position = 0
    while position < len(ids):
        piece = ids[position : position + rng.choice([1, 1, 1, 2, 5])]
        first, position = position == 0, position + len(piece)
        prompt_rows = None
        if first and params.prompt_logprobs is not None:
            arrays = logprob_rows(rng, prompt[1:], params.prompt_logprobs)
            prompt_rows = LogprobsTensors(*(torch.from_numpy(array) for array in arrays))
        rows = None if params.logprobs is None else LogprobsLists(*logprob_rows(rng, piece, params.logprobs))
        last = position >= len(ids)
        outputs.append(
            EngineCoreOutput(
                request_id="r",
                new_token_ids=piece,
                new_logprobs=rows,
                new_prompt_logprobs_tensors=prompt_rows,
                finish_reason=FinishReason.LENGTH if last else None,
                prefill_stats=PrefillStats(num_cached_tokens=3) if first else None,
            )
        )
    return outputs


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("prompt_logprobs", [None, 0, 2])
@pytest.mark.parametrize("flat", [False, True])
def test_outputs_survive(logprobs: int | None, prompt_logprobs: int | None, flat: bool) -> None:
    """Engine -> replica -> wire -> ingress shows a client the same as vLLM's processor fed by the engine itself."""
    for seed in range(6):
        rng = random.Random(seed)
        params = SamplingParams(
            max_tokens=99,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            flat_logprobs=flat,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt, ids = tokenizer().encode("User 🎉 says 你好"), tokenizer().encode(TEXT)
        plain, ingress = Reader(prompt, params, "x"), Reader(prompt, params, "x")
        replica = Reader(prompt, decode_params(encode_params(params, 1)), None)
        start = 0
        for output in engine_outputs(rng, prompt, ids, params):
            expected = plain.feed(msgspec.structs.replace(output))
            at_replica = replica.feed(output)
            assert at_replica is not None
            frame = msgspec.msgpack.encode(to_delta("r", 1, start, at_replica))
            delta = msgspec.msgpack.decode(frame, type=Delta)
            got = ingress.feed(to_engine_output(delta, first=start == 0))
            start += len(delta.token_ids)
            assert expected is not None
            assert got is not None
            assert seen(got) == seen(expected)
        assert start == len(ids)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_text_does_not_depend_on_the_cuts(data: st.DataObject) -> None:
    """Any tokens, cut into deltas anywhere (inside UTF-8 characters too), give the text of the whole."""
    ids = data.draw(st.lists(st.integers(3, 49151), min_size=1, max_size=40))
    ids = [*tokenizer().encode(data.draw(st.text(max_size=20))), *ids]
    params = SamplingParams(max_tokens=len(ids), output_kind=RequestOutputKind.DELTA)
    texts = []
    for cut_seed in (None, data.draw(st.integers(0, 10**6))):
        rng = random.Random(cut_seed)
        reader, text, position = Reader([1, 2], params, "x"), "", 0
        while position < len(ids):
            size = 1 if cut_seed is None else rng.randint(1, 6)
            piece = ids[position : position + size]
            position += len(piece)
            reason = "length" if position >= len(ids) else None
            got = reader.feed(to_engine_output(Delta("r", 1, position - len(piece), piece, reason), position == 0))
            text += got.outputs[0].text if got is not None else ""
        texts.append(text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("reason", list(FinishReason), ids=str)
def test_finish_reasons_survive(reason: FinishReason) -> None:
    """Every finish reason of vLLM has its name on the wire, and a stop token's id goes with it."""
    stop = 2 if reason is FinishReason.STOP else None
    delta = Delta("r", 1, 0, [2], str(reason), stop)
    output = to_engine_output(delta, first=True)
    assert output.finish_reason is reason
    assert output.stop_reason == stop
    assert output.finished


def test_cached_tokens_come_once() -> None:
    """Prompt tokens found in the prefix cache are told with the first delta and counted by the client once."""
    first = Delta("r", 1, 0, [5], cached_tokens=32, cache_creation_tokens=16)
    stats = to_engine_output(first, first=True).prefill_stats
    assert stats is not None
    assert (stats.num_cached_tokens, stats.num_cache_creation_tokens) == (32, 16)
    assert to_engine_output(first, first=False).prefill_stats is None


@pytest.mark.parametrize(("told", "kept"), [(12, 12), (0, None), (-1, None), ("12", None), (2.5, None), (None, None)])
def test_true_length_travels_beside_the_ticket(told: object, kept: int | None) -> None:
    """The oracle hint of `vllm_xargs` moves into our own extra argument if it is a count of tokens; else it is gone."""
    params = SamplingParams(extra_args={"a": "b", "tidegate_output_tokens": told})
    expected = {"ticket": 7} | ({} if kept is None else {"output_tokens": kept})
    assert decode_params(encode_params(params, 7)).extra_args == {"a": "b", "tidegate": expected}
