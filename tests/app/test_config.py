"""What an accepted configuration means for the engine, the deployments and their placement."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from ray import serve

from app.config import TidegateConfig, load_config
from app.config.engine import engine_fields, installed_device, parser_names


class Stub:
    """Stands for a deployment's class, to let Serve check options without a cluster."""


def test_an_empty_file_is_the_default_fleet() -> None:
    """No argument is needed: the bundled model, LARRY, tiered SAL, two replicas that fit two cores with the ingress."""
    config = load_config({}, "cpu")
    replica, ingress = config.deployment_options(), config.ingress_options()
    assert config.model_loading_config.source == "default"
    assert config.user_config() == {
        "scheduling": {"policy": "larry"},
        "balancing": {"policy": "tiered_sal", "stale_s": 1.0},
    }
    assert (
        replica["num_replicas"] * replica["ray_actor_options"]["num_cpus"] + ingress["ray_actor_options"]["num_cpus"]
        <= 2
    )


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ({"model_id": "smollm2-135m-instruct"}, "default"),
        ({"model_id": "tiny", "model_source": "default"}, "default"),
        ({"model_id": "org/model"}, "org/model"),
        ({"model_id": "m", "model_source": "/models/m"}, "/models/m"),
    ],
)
def test_the_model_source_follows_serve_llm(model: dict[str, str], source: str) -> None:
    """Without a source the id is the Hugging Face id, except for the bundled model's own id."""
    assert load_config({"model_loading_config": model}, "cpu").model_loading_config.source == source


def test_cpu_engine_arguments_have_cpu_defaults_that_the_user_can_override() -> None:
    """The engine gets what the CPU needs, the user's keys win, the model is served under its id only."""
    raw = {
        "model_loading_config": {"model_id": "m", "model_source": "default", "tokenizer_source": "/tok"},
        "engine_kwargs": {"block_size": 64, "max_model_len": 1024},
        "cpu": {"kv_cache_mib": 64},
    }
    assert load_config(raw, "cpu").engine_args("/model") == {
        "model": "/model",
        "tokenizer": "/tok",
        "served_model_name": ["m"],
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 32,
        "block_size": 64,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 << 20,
    }


def test_gpu_engine_arguments_are_the_users() -> None:
    """On GPU vLLM's own defaults hold; only a replica of several workers names the executor that can place them."""
    assert load_config({}, "gpu").engine_args("/m") == {"model": "/m", "served_model_name": ["smollm2-135m-instruct"]}
    parallel = load_config({"engine_kwargs": {"tensor_parallel_size": 2}}, "gpu")
    assert parallel.engine_args("/m")["distributed_executor_backend"] == "ray"


def test_a_single_gpu_replica_holds_its_gpu_itself() -> None:
    """One worker runs in the replica's own processes, on a node with the wanted GPU model."""
    assert load_config({"accelerator_type": "A10"}, "gpu").replica_actor_options() == {
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 1},
        "placement_group_bundles": [{"GPU": 1, "CPU": 1, "accelerator_type:A10G": 0.001}],
        "placement_group_strategy": "STRICT_PACK",
    }


@pytest.mark.parametrize(
    ("engine", "group", "bundles", "strategy"),
    [
        ({"tensor_parallel_size": 4}, None, [{"GPU": 1, "CPU": 1}] * 4, "STRICT_PACK"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, None, [{"GPU": 1, "CPU": 1}] * 4, "PACK"),
        (
            {"tensor_parallel_size": 2},
            {"bundle_per_worker": {"GPU": 1, "CPU": 3}},
            [{"GPU": 1, "CPU": 3}] * 2,
            "STRICT_PACK",
        ),
        (
            {"tensor_parallel_size": 2},
            {"bundles": [{"GPU": 1, "CPU": 2}, {"GPU": 1}], "strategy": "SPREAD"},
            [{"GPU": 1, "CPU": 2}, {"GPU": 1}],
            "SPREAD",
        ),
    ],
)
def test_parallel_replicas_get_a_placement_group(engine: Any, group: Any, bundles: Any, strategy: str) -> None:
    """Each worker has one bundle; the replica's own process takes no GPU away from them."""
    raw = {"engine_kwargs": engine} | ({"placement_group_config": group} if group else {})
    options = load_config(raw, "gpu").replica_actor_options()
    assert options["placement_group_bundles"] == bundles
    assert options["placement_group_strategy"] == strategy
    assert "num_gpus" not in options["ray_actor_options"]


@pytest.mark.parametrize(
    ("raw", "device"),
    [
        ({}, "cpu"),
        ({"deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}}}, "cpu"),
        ({"deployment_config": {"num_replicas": "auto"}}, "cpu"),
        ({"runtime_env": {"env_vars": {"A": "1"}}, "cpu": {"threads_per_replica": 4}}, "cpu"),
        ({"accelerator_type": "H100", "engine_kwargs": {"tensor_parallel_size": 4}}, "gpu"),
        ({"deployment_config": {"ray_actor_options": {"num_cpus": 4, "memory": 1e9, "resources": {"a": 1}}}}, "gpu"),
    ],
)
def test_ray_serve_accepts_the_options(raw: dict[str, Any], device: Any) -> None:
    """What the configuration gives the deployments passes Serve's own checks (bundles hold the replica's process)."""
    config = load_config(raw, device)
    replica = serve.deployment(Stub, name="EngineReplica").options(**config.deployment_options())
    ingress = serve.deployment(Stub, name="Ingress").options(**config.ingress_options())
    assert replica.user_config == config.user_config()
    assert ingress.num_replicas == 1


@pytest.mark.parametrize(
    ("section", "size"),
    [
        ({}, 2),
        ({"num_replicas": 5}, 5),
        ({"autoscaling_config": {"max_replicas": 7}}, 7),
        ({"num_replicas": "auto", "autoscaling_config": {"max_replicas": 3}}, 3),
        ({"num_replicas": "auto"}, 100),
    ],
)
def test_the_fleet_size_is_the_most_replicas_that_may_run(section: dict[str, Any], size: int) -> None:
    """Cores are shared among as many replicas as Serve may start."""
    assert load_config({"deployment_config": section}, "cpu").deployment_config.fleet_size == size


def test_a_serve_llm_file_needs_no_more_than_its_args() -> None:
    """One entry of llm_configs means the same as the flat form; front-end arguments arrive at the ingress."""
    entry = {
        "model_loading_config": {"model_id": "qwen", "model_source": "Qwen/Qwen2.5-7B-Instruct"},
        "accelerator_type": "A10",
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
        "engine_kwargs": {"tensor_parallel_size": 2, "tool_call_parser": "hermes", "enable_auto_tool_choice": True},
    }
    config = load_config({"llm_configs": [entry], "scheduling": {"policy": "fcfs"}}, "gpu")
    flat = load_config({**entry, "scheduling": {"policy": "fcfs"}}, "gpu")
    assert config.model_dump() == flat.model_dump()
    assert config.ingress.front_end()["tool_call_parser"] == "hermes"
    assert config.engine_kwargs == {"tensor_parallel_size": 2}


def test_the_reasoning_parser_reaches_the_engine_as_well() -> None:
    """Structured output starts after the reasoning, which the engine must recognise too."""
    config = load_config({"engine_kwargs": {"reasoning_parser": "qwen3"}}, "cpu")
    assert config.ingress.reasoning_parser == config.engine_args("/m")["reasoning_parser"] == "qwen3"


def test_loading_leaves_the_input_untouched() -> None:
    """The mapping that Serve hashes to detect changes is not edited."""
    raw = {"engine_kwargs": {"tool_call_parser": "hermes"}, "llm_configs": [{"cpu": {}}]}
    before = pickle.dumps(raw)
    load_config(raw, "cpu")
    assert pickle.dumps(raw) == before


def test_the_configuration_survives_the_way_to_an_actor() -> None:
    """A pickled configuration means the same, its device included."""
    config = load_config({"accelerator_type": "L4"}, "gpu")
    copy: TidegateConfig = pickle.loads(pickle.dumps(config))
    assert copy.replica_actor_options() == config.replica_actor_options()
    assert not copy.is_cpu


def test_the_names_read_from_vllms_source_are_vllms_names() -> None:
    """Contract with the installed vLLM: engine arguments and parser names, as its classes have them at run time."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert set(engine_fields()) == {f.name for f in dataclasses.fields(AsyncEngineArgs) if not f.name.startswith("_")}
    assert parser_names("tool_parsers") == set(ToolParserManager.list_registered())
    assert parser_names("reasoning") == set(ReasoningParserManager.list_registered())
    assert current_platform.is_cpu() == (installed_device() == "cpu")


def test_front_end_arguments_are_vllms() -> None:
    """Contract with the installed vLLM: each of them is an argument of its server, with the same default."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server = vars(make_arg_parser(FlexibleArgumentParser()).parse_args([]))
    ours = load_config({}, "cpu").ingress.front_end()
    assert {name: server[name] for name in ours} == ours


def test_accepted_engine_arguments_build_vllms_own_class() -> None:
    """What `engine_args` returns can be passed to AsyncEngineArgs as it is."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert AsyncEngineArgs(**load_config({}, "cpu").engine_args("/m")).block_size == 32
