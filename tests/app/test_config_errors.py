"""What a refused configuration says: the field, what is allowed, what to do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import ConfigError, TidegateConfig, load_config

CPU, GPU = "cpu", "gpu"

# device, args, path of the problem, part of what is allowed, part of the remedy
REFUSED: list[tuple[str, Any, str, str, str]] = [
    (CPU, ["a"], "args", "mapping", "reference page"),
    (CPU, {"modle_loading_config": {}}, "modle_loading_config", "engine_kwargs", "did you mean model_loading_config"),
    (CPU, {"llm_engine": "vLLM"}, "llm_engine", "engine_kwargs", "remove it"),
    (CPU, {"lora_config": {}}, "lora_config", "engine_kwargs", "not served"),
    (CPU, {"llm_configs": [{}, {}]}, "llm_configs", "a list of one mapping", "one Serve application"),
    (CPU, {"llm_configs": [{"cpu": {}}], "cpu": {}}, "cpu", "one of the two places", "remove one"),
    (CPU, {"llm_configs": [{"cpu": {"kv_cache_mib": 1}}]}, "llm_configs[0].cpu.kv_cache_mib", ">= 16", "default 256"),
    (CPU, {"model_loading_config": {}}, "model_loading_config.model_id", "text", "add it"),
    (CPU, {"model_loading_config": {"model_id": "a b"}}, "model_loading_config.model_id", "matching", "allowed value"),
    (
        CPU,
        {"model_loading_config": {"model_id": "m", "model_source": "s3://bucket/m"}},
        "model_loading_config.model_source",
        "local folder",
        "download it",
    ),
    (CPU, {"engine_kwargs": {"max_modle_len": 1}}, "engine_kwargs.max_modle_len", "AsyncEngineArgs", "max_model_len"),
    (CPU, {"engine_kwargs": {"max_model_len": "2k"}}, "engine_kwargs.max_model_len", "int", "remove the line"),
    (CPU, {"engine_kwargs": {"enforce_eager": 1}}, "engine_kwargs.enforce_eager", "bool", "remove the line"),
    (CPU, {"engine_kwargs": {"max_num_seqs": True}}, "engine_kwargs.max_num_seqs", "int or null", "remove the line"),
    (CPU, {"engine_kwargs": {"dtype": "bf16"}}, "engine_kwargs.dtype", "bfloat16", "remove the line"),
    (CPU, {"engine_kwargs": {"max_num_seqs": 0}}, "engine_kwargs.max_num_seqs", ">= 1", "remove the line"),
    (
        GPU,
        {"engine_kwargs": {"gpu_memory_utilization": 92}},
        "engine_kwargs.gpu_memory_utilization",
        "<= 1.0",
        "remove the line",
    ),
    (
        CPU,
        {"engine_kwargs": {"scheduler_cls": "a.B"}},
        "engine_kwargs.scheduler_cls",
        "not to be set",
        "scheduling.policy",
    ),
    (
        CPU,
        {"engine_kwargs": {"served_model_name": "a"}},
        "engine_kwargs.served_model_name",
        "not to be set",
        "model_id",
    ),
    (
        GPU,
        {"engine_kwargs": {"data_parallel_size_local": 2}},
        "engine_kwargs.data_parallel_size_local",
        "not to be set",
        "num_replicas",
    ),
    (CPU, {"engine_kwargs": {"block_size": 16}}, "engine_kwargs.block_size", "multiple of 32", "default 32"),
    (
        CPU,
        {"engine_kwargs": {"tensor_parallel_size": 2}},
        "engine_kwargs.tensor_parallel_size",
        "1 on CPU",
        "num_replicas",
    ),
    (
        CPU,
        {"engine_kwargs": {"max_num_batched_tokens": 16}},
        "engine_kwargs.max_num_batched_tokens",
        ">= 32",
        "max_num_seqs",
    ),
    (
        CPU,
        {"engine_kwargs": {"enable_chunked_prefill": False, "max_model_len": 2048}},
        "engine_kwargs.max_num_batched_tokens",
        ">= 2048",
        "enable_chunked_prefill",
    ),
    (
        CPU,
        {"engine_kwargs": {"tool_call_parser": "hermes"}, "ingress": {"tool_call_parser": "hermes"}},
        "engine_kwargs.tool_call_parser",
        "one of the two places",
        "ingress.tool_call_parser",
    ),
    (CPU, {"scheduling": {"policy": "lary"}}, "scheduling.policy", "fcfs, guarded_larry, larry", "did you mean larry"),
    (CPU, {"scheduling": {"alpha": 0}}, "scheduling.alpha", "> 0", "default 1.0"),
    (CPU, {"scheduling": {"policy": "fcfs", "alpha": 1}}, "scheduling.alpha", "no parameters", "remove it"),
    (CPU, {"scheduling": {"memory_unit": "pages"}}, "scheduling.memory_unit", "blocks", "default"),
    (CPU, {"scheduling": {"policy": "guarded_larry", "guard_s": -1}}, "scheduling.guard_s", ">= 0", "default 30.0"),
    (CPU, {"balancing": {"policy": "sal", "bta": 2}}, "balancing.bta", "beta", "did you mean beta"),
    (CPU, {"balancing": {"policy": "sal", "beta": -2}}, "balancing.beta", "> 0", "default null"),
    (CPU, {"balancing": {"stale_s": 0}}, "balancing.stale_s", ">= 0.05 and <= 600", "default 1.0"),
    (CPU, {"deployment_config": {"num_replicas": 0}}, "deployment_config.num_replicas", ">= 1", "remove the line"),
    (CPU, {"deployment_config": {"num_replicas": "2"}}, "deployment_config.num_replicas", "auto", "remove the line"),
    (
        CPU,
        {"deployment_config": {"num_replicas": 2, "autoscaling_config": {"max_replicas": 2}}},
        "deployment_config.num_replicas",
        "one of num_replicas and autoscaling_config",
        "fixed fleet",
    ),
    (
        CPU,
        {"deployment_config": {"autoscaling_config": {"max_replica": 2}}},
        "deployment_config.autoscaling_config.max_replica",
        "min_replicas",
        "did you mean max_replicas",
    ),
    (
        CPU,
        {"deployment_config": {"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}},
        "deployment_config.autoscaling_config",
        "max_replicas (2) must be greater",
        "allowed value",
    ),
    (
        CPU,
        {"deployment_config": {"request_router_config": {}}},
        "deployment_config.request_router_config",
        "num_replicas",
        "`balancing`",
    ),
    (
        GPU,
        {"deployment_config": {"ray_actor_options": {"num_gpus": 1}}},
        "deployment_config.ray_actor_options.num_gpus",
        "num_cpus",
        "tensor_parallel_size",
    ),
    (CPU, {"ingress": 3}, "ingress", "mapping", "write its keys below it"),
    (CPU, {"ingress": {"num_replicas": 0}}, "ingress.num_replicas", ">= 1 and <= 1024", "default 1"),
    (CPU, {"ingress": {"max_logprobs": 5}}, "ingress.max_logprobs", "num_replicas", "engine_kwargs.max_logprobs"),
    (CPU, {"ingress": {"request_timeout_s": 0}}, "ingress.request_timeout_s", "> 0 or null", "default null"),
    (
        CPU,
        {"ingress": {"tool_call_parser": "hermez"}},
        "ingress.tool_call_parser",
        "llama3_json",
        "did you mean hermes",
    ),
    (CPU, {"ingress": {"reasoning_parser": "qwen"}}, "ingress.reasoning_parser", "deepseek_r1", "qwen3"),
    (
        CPU,
        {"ingress": {"enable_auto_tool_choice": True}},
        "ingress.tool_call_parser",
        "tool-call parser",
        "enable_auto_tool_choice",
    ),
    (
        CPU,
        {"ingress": {"chat_template_content_format": "text"}},
        "ingress.chat_template_content_format",
        "one of auto, string, openai",
        "default auto",
    ),
    (CPU, {"failover": {"max_attempts": 0}}, "failover.max_attempts", ">= 1", "default 3"),
    (CPU, {"failover": {"timeout_s": "30s"}}, "failover.timeout_s", "number > 0", "default 30.0"),
    (CPU, {"accelerator_type": "H100"}, "accelerator_type", "null on CPU", "extra `gpu`"),
    (GPU, {"accelerator_type": "h100"}, "accelerator_type", "H100", "Ray's name"),
    (CPU, {"placement_group_config": {"bundles": [{"CPU": 1}]}}, "placement_group_config", "null", "ray_actor_options"),
    (
        GPU,
        {"placement_group_config": {"bundles": [{"GPU": 1, "CPU": 1}]}, "engine_kwargs": {"tensor_parallel_size": 4}},
        "placement_group_config.bundles",
        "4 bundles with a GPU",
        "GPU: 1",
    ),
    (
        GPU,
        {"placement_group_config": {"bundles": [{"GPU": 1}]}},
        "placement_group_config.bundles",
        "CPU >= 1 in the first bundle",
        "CPU: 1",
    ),
    (
        GPU,
        {"placement_group_config": {"bundles": [{"GPU": 1, "CPU": 1}], "bundle_per_worker": {"GPU": 1, "CPU": 1}}},
        "placement_group_config.bundles",
        "one of bundles and bundle_per_worker",
        "remove one",
    ),
    (
        GPU,
        {"placement_group_config": {"bundles": [{"GPU": -1}]}},
        "placement_group_config.bundles[0].GPU",
        "greater than or equal to 0",
        "allowed value",
    ),
    (
        GPU,
        {"placement_group_config": {"strategy": "TIGHT"}},
        "placement_group_config.strategy",
        "STRICT_PACK",
        "default",
    ),
    (CPU, {"runtime_env": {"env_var": {}}}, "runtime_env.env_var", "working_dir", "did you mean env_vars"),
    (CPU, {"runtime_env": {"env_vars": {"A": 1}}}, "runtime_env.env_vars.A", "text", 'in quotes: "1"'),
    (CPU, {"cpu": {"threads_per_replica": 0}}, "cpu.threads_per_replica", "auto", "default auto"),
    (
        CPU,
        {"cpu": {"kv_cache_mib": 64}, "engine_kwargs": {"kv_cache_memory_bytes": 1 << 30}},
        "cpu.kv_cache_mib",
        "one of the two keys",
        "remove one",
    ),
]


@pytest.mark.parametrize(("device", "args", "path", "allowed", "remedy"), REFUSED, ids=[row[2] for row in REFUSED])
def test_a_refusal_names_the_field_its_range_and_the_remedy(
    device: Any, args: Any, path: str, allowed: str, remedy: str
) -> None:
    """Each bad value gives exactly one problem, on one line, at its own path, without pydantic's own words."""
    with pytest.raises(ConfigError) as caught:
        load_config(args, device)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert allowed in problem.allowed
    assert remedy in problem.remedy
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert "http" not in message
    assert "validation error" not in message


def test_all_problems_of_a_file_are_reported_at_once() -> None:
    """Problems of different sections, and several of one section, arrive together, one line each."""
    with pytest.raises(ConfigError) as caught:
        load_config(
            {
                "engine_kwargs": {"dtype": "bf16", "max_num_seqs": 0},
                "scheduling": {"policy": "larry", "alpha": -1},
                "ingress": {"num_replicas": 0, "max_body_mib": 0},
                "cpuu": {},
            },
            "cpu",
        )
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "engine_kwargs.dtype",
        "engine_kwargs.max_num_seqs",
        "scheduling.alpha",
        "ingress.num_replicas",
        "ingress.max_body_mib",
        "cpuu",
    ]


def test_a_long_value_is_shown_shortened() -> None:
    """A value of any length leaves the line readable."""
    with pytest.raises(ConfigError) as caught:
        load_config({"ingress": {"chat_template_content_format": "x" * 5000}}, "cpu")
    assert len(str(caught.value)) < 400


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_SECTIONS = st.sampled_from([*TidegateConfig.model_fields, "llm_configs", "other"])
_KEYS = st.sampled_from(
    "policy alpha beta num_replicas autoscaling_config block_size max_model_len bundles env_vars strategy model_id "
    "model_source tool_call_parser ray_actor_options timeout_s dtype levels default headroom file env".split()
)


@settings(deadline=None, max_examples=200)  # the first example reads vLLM's source
@given(
    st.dictionaries(_SECTIONS, _JSON | st.dictionaries(_KEYS, _JSON, max_size=4), max_size=4),
    st.sampled_from(["cpu", "gpu"]),
)
def test_any_mapping_is_accepted_or_explained(args: dict[str, Any], device: Any) -> None:
    """No input raises anything but ConfigError, and each of its problems fills every part of its line."""
    try:
        load_config(args, device)
    except ConfigError as error:
        problems = error.problems
    else:
        return
    assert problems
    assert all(problem.path and problem.what and problem.allowed and problem.remedy for problem in problems)
