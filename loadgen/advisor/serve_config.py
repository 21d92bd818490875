"""The advised fleet as a Serve file, as `python -m app.config` accepts it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.advisor.trial import ORACLE, Pair
from loadgen.run.slo import Slos, slo_of
from loadgen.simulator.engine import Shape

# Our names of models: how clients call them, and where vLLM finds the weights.
SOURCES = {
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3-70b-fp8": "RedHatAI/Meta-Llama-3-70B-Instruct-FP8",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "smollm2-135m": "default",
}
# Our names of devices: what Ray finds out by itself. It has names for both sizes of A100 too, which a node has only if
# it was started with them.
ACCELERATORS = {
    "a100-40g": "A100",
    "a100-80g": "A100",
    "h100-80g": "H100",
    "h200-141g": "H200",
    "l4-24g": "L4",
}
FOUR = ("critical", "standard", "relaxed", "background")  # the product's own names


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a replica runs: our name of the device (None: on CPU), how many of them, an engine of that shape.

    `kv_bytes`: of the KV cache on each device, where it is set and does not follow from the device; else None.
    `migration`: whether requests move between replicas while they run.
    """

    model: str
    device: str | None
    tp: int
    shape: Shape
    kv_bytes: int | None = None
    migration: bool = True


def tier_names(count: int) -> tuple[str, ...]:
    """Names for so many tiers, the highest first."""
    return FOUR if count == len(FOUR) else ("standard",) if count == 1 else tuple(f"tier{i}" for i in range(count))


def written(machine: Machine, pair: Pair, replicas: int, slos: Slos, tiers: Sequence[int], head: str) -> str:
    """The file. `tiers`: requests of each tier in the workload; `head`: lines for its top, without `#`."""
    names = tier_names(len(tiers))
    levels = [{"name": name, **_promises(slos, tier)} for tier, name in enumerate(names)]
    most = max(range(len(tiers)), key=lambda tier: tiers[tier])
    engine: dict[str, Any] = {
        "max_model_len": machine.shape.max_model_len,
        "block_size": machine.shape.block_size,
        "max_num_seqs": machine.shape.max_num_seqs,
        "max_num_batched_tokens": machine.shape.max_num_batched_tokens,
    }
    if machine.tp > 1:
        engine["tensor_parallel_size"] = machine.tp
    if machine.kv_bytes is not None:
        engine["kv_cache_memory_bytes"] = machine.kv_bytes
    else:
        engine["gpu_memory_utilization"] = 0.9
    lines = [f"# {line}" for line in head.splitlines()]
    lines += [
        "proxy_location: EveryNode" if machine.device else "proxy_location: HeadOnly",
        "",
        "http_options:",
        "  host: 127.0.0.1            # 0.0.0.0 lets other machines in, with api_keys",
        "  port: 8000",
        "",
        "applications:",
        "  - name: tidegate",
        "    route_prefix: /",
        "    import_path: app.main:build",
        "    args:",
        "      model_loading_config:",
        f"        model_id: {machine.model}",
        f"        model_source: {SOURCES[machine.model]}   # or the folder or Hugging Face id of yours",
    ]
    if machine.device:
        lines.append(f"      accelerator_type: {ACCELERATORS[machine.device]}")
    lines += ["      engine_kwargs:", *(f"        {key}: {json.dumps(value)}" for key, value in engine.items())]
    lines += [
        "      deployment_config:",
        f"        num_replicas: {replicas}",
        "      migration:",
        f"        enabled: {json.dumps(machine.migration)}",
        "      tiers:",
        f"        default: {names[most]}   # most of the workload's requests were of it",
        "        levels:",
        *(f"          - {_flow(level)}" for level in levels),
        "    deployments:",
        "      - name: EngineReplica",
        "        user_config:",
        f"          scheduling: {_flow(_policy(pair.scheduling))}",
        f"          balancing: {_flow(_policy(pair.balancing))}",
    ]
    return "\n".join(lines) + "\n"


def _promises(slos: Slos, tier: int) -> dict[str, float]:
    slo = slo_of(slos, tier)
    if slo is None:
        return {}
    bounds = {"ttft_slo_s": slo.ttft / 1e3, "tpot_slo_s": slo.tpot / 1e3}
    return {key: seconds for key, seconds in bounds.items() if math.isfinite(seconds)}


def _policy(spec: Mapping[str, Any]) -> dict[str, Any]:
    """As the configuration has it; nobody tells a product the true lengths, so their oracle is left out."""
    return {
        "policy": spec["name"],
        **{k: v for k, v in spec.items() if k != "name" and (k, v) != ORACLE},
    }


def _flow(mapping: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in mapping.items()) + "}"
