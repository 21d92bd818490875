"""The whole configuration: its sections, what must fit together, and what the deployments are started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from app.config.admin import AdminConfig
from app.config.deployment import (
    CpuConfig,
    DeploymentConfig,
    PlacementGroupConfig,
    accelerator_names,
    check_runtime_env,
)
from app.config.engine import CPU_DEFAULTS, Device, check_engine_kwargs, installed_device
from app.config.errors import ConfigError, Problem, Refused, problems_of
from app.config.ingress import FailoverConfig, IngressConfig
from app.config.keys import ApiKeysConfig
from app.config.migration import MigrationConfig
from app.config.model import DEFAULT_MODEL_ID, DEFAULT_SOURCE, ModelLoadingConfig
from app.config.policy import BalancingConfig, SchedulingConfig
from app.config.serve_llm import unwrap
from app.config.tiers import TiersConfig
from app.config.tracing import TracingConfig

_CPU_SHARE = 0.8  # CPUs reserved per engine thread: 2 one-thread replicas and the ingress fit two cores
_COORDINATOR_CPUS = 0.01
_HEAD_NODE = "node:__internal_head__"  # Ray's resource of the cluster's head
_ACCELERATOR_SHARE = 0.001  # of Ray's `accelerator_type:X` resource: pins the node type, reserves next to nothing


class UserConfig(BaseModel):
    """`user_config` of the deployment EngineReplica: what changes live, without a restart; it wins over `args`."""

    model_config = ConfigDict(extra="forbid")
    MOVED: ClassVar[dict[str, str]] = {"tiers": "write it below `args`: tiers are fixed while the fleet runs"}

    scheduling: SchedulingConfig | None = Field(default=None, description="As `args.scheduling`. Null: as started.")
    balancing: BalancingConfig | None = Field(default=None, description="As `args.balancing`. Null: as started.")


class TidegateConfig(BaseModel):
    """One Tidegate application: one model, many replicas."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    MOVED: ClassVar[dict[str, str]] = {
        "llm_engine": "remove it: vLLM is the only engine",
        "accelerator_config": "remove it: the device follows from the installed vLLM; see `accelerator_type`",
        "lora_config": "remove it: LoRA adapters are not served",
        "server_cls": "remove it: Tidegate runs its own replica",
        "experimental_configs": "remove it; ingress replicas are `ingress.num_replicas`",
        "log_engine_metrics": "remove it: engine metrics are always exported",
        "callback_config": "remove it: callbacks are not supported",
        "ingress_deployment_config": "set `ingress` instead",
        "ingress_cls_config": "set `ingress` instead",
        "num_replicas": "set `deployment_config.num_replicas` instead",
        "tensor_parallel_size": "set `engine_kwargs.tensor_parallel_size` instead",
    }

    model_loading_config: ModelLoadingConfig = Field(
        default_factory=lambda: ModelLoadingConfig(
            model_id=DEFAULT_MODEL_ID, model_source=DEFAULT_SOURCE, tokenizer_source=None
        ),
        description="Which model is served, and under which name.",
    )
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        validate_default=True,
        description="Any field of vLLM's AsyncEngineArgs that Tidegate does not decide itself.",
    )
    scheduling: SchedulingConfig = Field(
        default_factory=SchedulingConfig,
        description="Order of requests inside a replica: policy and its parameters.",
    )
    balancing: BalancingConfig = Field(
        default_factory=BalancingConfig, description="Which replica gets a new request: policy and its parameters."
    )
    tiers: TiersConfig = Field(
        default_factory=lambda: TiersConfig.model_validate({}), description="Priority tiers of requests."
    )
    api_keys: ApiKeysConfig = Field(
        default_factory=lambda: ApiKeysConfig.model_validate({}), description="Who may call the HTTP API."
    )
    deployment_config: DeploymentConfig = Field(
        default_factory=DeploymentConfig, description="The engine replicas, in Ray Serve's terms."
    )
    ingress: IngressConfig = Field(default_factory=IngressConfig, description="OpenAI API in front of the replicas.")
    failover: FailoverConfig = Field(
        default_factory=FailoverConfig, description="Going on elsewhere when a replica died."
    )
    migration: MigrationConfig = Field(
        default_factory=MigrationConfig, description="Moving requests from replica to replica while they run."
    )
    admin: AdminConfig = Field(
        default_factory=lambda: AdminConfig.model_validate({}), description="Status page and actions, on another port."
    )
    tracing: TracingConfig = Field(
        default_factory=lambda: TracingConfig.model_validate({}), description="OpenTelemetry spans of requests."
    )
    accelerator_type: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="GPU model by Ray's name (`H100`, `L4`, ...). Null: any GPU; on CPU it must stay null.",
    )
    placement_group_config: PlacementGroupConfig | None = Field(
        default=None, description="Resources of one replica's workers. Null: one GPU and one CPU for each worker."
    )
    runtime_env: dict[str, Any] | None = Field(
        default=None, description="Ray runtime environment of the replicas and the ingress."
    )
    cpu: CpuConfig = Field(default_factory=CpuConfig, description="Engine on CPU; without effect on GPU.")

    _device: Device = PrivateAttr("cpu")

    @field_validator("engine_kwargs")
    @classmethod
    def _engine_arguments(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if problems := check_engine_kwargs(value, _device_of(info)):
            raise Refused(*problems)
        return value

    @field_validator("accelerator_type")
    @classmethod
    def _known_accelerator(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        value = "A10G" if value == "A10" else value  # Ray's name for it
        if _device_of(info) == "cpu":
            remedy = "remove it, or install Tidegate with the extra `gpu`"
            raise Refused(Problem("", "the installed vLLM is the CPU build", value, "null on CPU", remedy))
        if value not in accelerator_names():
            allowed = "null or one of " + ", ".join(accelerator_names())
            raise Refused(Problem("", "unknown accelerator", value, allowed, "use Ray's name of the GPU"))
        return value

    @field_validator("runtime_env")
    @classmethod
    def _known_runtime_env(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        check_runtime_env(value or {})
        return value

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> TidegateConfig:
        self._device = _device_of(info)
        problems = []
        if self.placement_group_config is not None:
            problems += self.placement_group_config.problems(self.world_size, self._device, self.deployment_config)
        if "kv_cache_memory_bytes" in self.engine_kwargs and "kv_cache_mib" in self.cpu.model_fields_set:
            got, what = self.cpu.kv_cache_mib, "engine_kwargs.kv_cache_memory_bytes sets the same memory"
            problems.append(Problem("cpu.kv_cache_mib", what, got, "one of the two keys", "remove one of the two"))
        if problems:
            raise Refused(*problems)
        return self

    @property
    def device(self) -> Device:
        """`cpu` or `gpu`, by the installed vLLM."""
        return self._device

    @property
    def is_cpu(self) -> bool:
        """Whether the installed vLLM is the CPU build."""
        return self._device == "cpu"

    @property
    def model_id(self) -> str:
        """Name by which clients address the model."""
        return self.model_loading_config.model_id

    @property
    def world_size(self) -> int:
        """Workers of one replica: tensor parallel times pipeline parallel."""
        tensor, pipeline = (self.engine_kwargs.get(f"{k}_parallel_size") or 1 for k in ("tensor", "pipeline"))
        return int(tensor * pipeline)

    def engine_args(self, model_path: str) -> dict[str, Any]:
        """Keyword arguments of vLLM's AsyncEngineArgs for one replica on this device, without the scheduler class."""
        args: dict[str, Any] = {
            **(CPU_DEFAULTS if self.is_cpu else {}),
            **self.engine_kwargs,
            "model": model_path,
            "served_model_name": [self.model_id],
        }
        if self.model_loading_config.tokenizer_source:
            args["tokenizer"] = self.model_loading_config.tokenizer_source
        if self.ingress.reasoning_parser:
            args["reasoning_parser"] = self.ingress.reasoning_parser
        if self.is_cpu:
            args.setdefault("kv_cache_memory_bytes", self.cpu.kv_cache_mib << 20)
        elif self.world_size > 1:
            # only Ray's executor can place the workers of a replica into the bundles of its placement group
            args["distributed_executor_backend"] = "ray"
        return args

    def replica_actor_options(self) -> dict[str, Any]:
        """Serve options that place one engine replica: `ray_actor_options` and, on GPU, its placement group."""
        chosen = self.deployment_config.ray_actor_options
        actor: dict[str, Any] = chosen.model_dump(exclude_none=True)
        if self.runtime_env:
            actor["runtime_env"] = self.runtime_env
        if self.is_cpu:
            threads = self.cpu.threads_per_replica
            actor.setdefault("num_cpus", round(_CPU_SHARE * (1 if threads == "auto" else threads), 3))
            return {"ray_actor_options": actor}
        actor.setdefault("num_cpus", 1)
        group = self.placement_group_config or PlacementGroupConfig()
        bundles = group.expand(self.world_size, chosen)
        if self.accelerator_type:
            for bundle in bundles:
                bundle.setdefault(f"accelerator_type:{self.accelerator_type}", _ACCELERATOR_SHARE)
        if self.world_size == 1:
            actor["num_gpus"] = bundles[0]["GPU"]  # one worker: it runs in the replica's own processes
        spans_nodes = (self.engine_kwargs.get("pipeline_parallel_size") or 1) > 1
        return {
            "ray_actor_options": actor,
            "placement_group_bundles": bundles,
            "placement_group_strategy": group.strategy or ("PACK" if spans_nodes else "STRICT_PACK"),
        }

    def deployment_options(self) -> dict[str, Any]:
        """All Serve options of the deployment EngineReplica, for `Deployment.options(**...)`."""
        return {
            **self.deployment_config.serve_options(),
            **self.replica_actor_options(),
            "user_config": self.user_config(),
        }

    def ingress_options(self) -> dict[str, Any]:
        """All Serve options of the deployment Ingress, for `Deployment.options(**...)`."""
        shared = ("graceful_shutdown_timeout_s", "health_check_period_s", "health_check_timeout_s")
        return {
            **{name: getattr(self.deployment_config, name) for name in shared},
            "num_replicas": self.ingress.num_replicas,
            "max_ongoing_requests": self.ingress.max_ongoing_requests,
            "ray_actor_options": {
                "num_cpus": self.ingress.num_cpus,
                **({"runtime_env": self.runtime_env} if self.runtime_env else {}),
            },
        }

    def coordinator_options(self) -> dict[str, Any]:
        """All Serve options of the deployment Coordinator, for `Deployment.options(**...)`."""
        shared = ("health_check_period_s", "health_check_timeout_s")
        environment = {"runtime_env": self.runtime_env} if self.runtime_env else {}
        return {
            **{name: getattr(self.deployment_config, name) for name in shared},
            "num_replicas": 1,
            "max_ongoing_requests": 1000,
            "graceful_shutdown_timeout_s": 2.0,  # moves go on without it
            "ray_actor_options": {"num_cpus": _COORDINATOR_CPUS, **environment},
        }

    def admin_options(self) -> dict[str, Any]:
        """All Serve options of the deployment Admin, for `Deployment.options(**...)`: on the head node, at no cost."""
        options = self.coordinator_options()
        options["ray_actor_options"] |= {"num_cpus": 0, "resources": {_HEAD_NODE: 0.001}}
        return options

    def user_config(self) -> dict[str, Any]:
        """The `user_config` that EngineReplica starts with when the Serve file gives none."""
        return {"scheduling": self.scheduling.model_dump(), "balancing": self.balancing.model_dump()}


def _device_of(info: ValidationInfo) -> Device:
    return (info.context or {}).get("device") or installed_device()


def load_config(raw: Mapping[str, Any], device: Device | None = None) -> TidegateConfig:
    """Checked configuration of `raw` (the `args` of the Serve application).

    `device` overrides the device of the installed vLLM. Raises ConfigError with one line per problem.
    """
    args, prefixes = unwrap(raw)
    try:
        return TidegateConfig.model_validate(args, context={"device": device or installed_device()})
    except ValidationError as error:
        problems = problems_of(error, TidegateConfig, args)
    raise ConfigError(replace(p, path=prefixes.get(p.path.split(".")[0], "") + p.path) for p in problems)
