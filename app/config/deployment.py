"""The sections `deployment_config`, `placement_group_config` and `cpu`: where and how often a replica runs."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.config import JsonDict
from ray.runtime_env import RuntimeEnv
from ray.serve.config import AutoscalingConfig
from ray.util.accelerators import accelerators

from app.config.autoscaling import check_autoscaling, scaling
from app.config.errors import Problem, Refused, suggestion

_SECONDS: JsonDict = {"unit": "s"}
_DEFAULT_REPLICAS = 2


@cache
def accelerator_names() -> tuple[str, ...]:
    """Ray's names of the GPUs that vLLM runs on."""
    makers = ("NVIDIA_", "AMD_", "INTEL_MAX_")
    return tuple(value for name, value in vars(accelerators).items() if name.startswith(makers))


class RayActorOptions(BaseModel):
    """What Ray reserves for the replica's own process, beside its GPUs."""

    model_config = ConfigDict(extra="forbid")
    MOVED: ClassVar[dict[str, str]] = {
        "num_gpus": "set `engine_kwargs.tensor_parallel_size` or `placement_group_config` instead",
        "accelerator_type": "set `accelerator_type` of the application instead",
        "runtime_env": "set `runtime_env` of the application instead",
    }

    num_cpus: Annotated[float, Field(ge=0, le=1024, strict=True)] | None = Field(
        default=None,
        description="CPUs reserved. Null: 0.8 for each engine thread on CPU, 1 on GPU.",
        json_schema_extra={"unit": "cores"},
    )
    memory: Annotated[float, Field(gt=0, strict=True)] | None = Field(
        default=None, description="Memory reserved.", json_schema_extra={"unit": "bytes"}
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        default=None, description="Custom Ray resources."
    )


class DeploymentConfig(BaseModel):
    """The engine replicas; names and meaning are Ray Serve's."""

    model_config = ConfigDict(extra="forbid")
    MOVED: ClassVar[dict[str, str]] = {
        "name": "remove it: the deployment is called EngineReplica",
        "request_router_config": "choose the router's policy with `balancing`",
        "user_config": "write it below `deployments`, at `name: EngineReplica`, of the Serve file",
        "placement_group_bundles": "set `placement_group_config.bundles` instead",
        "placement_group_strategy": "set `placement_group_config.strategy` instead",
        "max_queued_requests": "set `ingress.max_queued_requests` instead",
        "logging_config": "set `logging_config` of the Serve file instead",
        "max_replicas_per_node": "limit replicas with `ray_actor_options.resources`",
    }

    num_replicas: Annotated[int, Field(ge=1, le=4096, strict=True)] | Literal["auto"] | None = Field(
        default=None,
        description=f"Engine replicas. Null: {_DEFAULT_REPLICAS}, or as autoscaling_config says.",
        json_schema_extra={"unit": "replicas"},
    )
    autoscaling_config: dict[str, Any] | None = Field(
        default=None,
        description="Ray Serve's AutoscalingConfig (`min_replicas`, `max_replicas`, ...), instead of num_replicas. "
        "The policy is freeness unless it names another one, or `target_ongoing_requests`: docs/autoscaling.md.",
    )
    max_ongoing_requests: int = Field(
        default=100_000,
        ge=1,
        le=10_000_000,
        strict=True,
        description="Calls that Serve lets run in a replica at once. High: the engine queues, the ingress bounds.",
        json_schema_extra={"unit": "requests"},
    )
    graceful_shutdown_timeout_s: float = Field(
        default=600.0,
        ge=0,
        strict=True,
        description="Longest wait for running requests when a replica stops.",
        json_schema_extra=_SECONDS,
    )
    graceful_shutdown_wait_loop_s: float = Field(
        default=0.2,
        gt=0,
        le=60,
        strict=True,
        description="How often a stopping replica looks whether it is empty.",
        json_schema_extra=_SECONDS,
    )
    health_check_period_s: float = Field(
        default=2.0, gt=0, strict=True, description="How often Serve checks a replica.", json_schema_extra=_SECONDS
    )
    health_check_timeout_s: float = Field(
        default=30.0,
        gt=0,
        strict=True,
        description="A check without answer for so long has failed.",
        json_schema_extra=_SECONDS,
    )
    ray_actor_options: RayActorOptions = Field(
        default_factory=lambda: RayActorOptions(num_cpus=None, memory=None, resources=None),
        description="What Ray reserves for the replica's own process.",
    )

    @field_validator("autoscaling_config")
    @classmethod
    def _autoscaling(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            check_autoscaling(value)
        return value

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> DeploymentConfig:
        if isinstance(self.num_replicas, int) and self.autoscaling_config is not None:
            what, allowed = "autoscaling_config is set as well", "one of num_replicas and autoscaling_config"
            remedy = "remove it, or remove `autoscaling_config` for a fixed fleet"
            raise Refused(Problem("num_replicas", what, self.num_replicas, allowed, remedy))
        return self

    @property
    def fleet_size(self) -> int:
        """Most engine replicas that may run at once."""
        if isinstance(self.num_replicas, int):
            return self.num_replicas
        if self.autoscaling_config is None and self.num_replicas is None:
            return _DEFAULT_REPLICAS
        default = AutoscalingConfig.default() if self.num_replicas == "auto" else AutoscalingConfig()
        return int((self.autoscaling_config or {}).get("max_replicas", default.max_replicas))

    @property
    def may_be_empty(self) -> bool:
        """Whether the fleet may have no replica while nobody asks for anything."""
        return self.autoscaling_config is not None and self.autoscaling_config.get("min_replicas") == 0

    def autoscaling(self) -> dict[str, Any] | None:
        """Serve's AutoscalingConfig with our policy and its defaults; as given where it scales by another policy."""
        given = self.autoscaling_config
        return scaling(given or {}) if given is not None or self.num_replicas == "auto" else None

    def serve_options(self) -> dict[str, Any]:
        """The Serve deployment options in this section, actor options left out."""
        options = self.model_dump(exclude={"ray_actor_options", "num_replicas", "autoscaling_config"})
        if (autoscaling := self.autoscaling()) is not None:
            options["autoscaling_config"] = autoscaling
        if self.num_replicas is not None or self.autoscaling_config is None:
            options["num_replicas"] = self.num_replicas or _DEFAULT_REPLICAS
        return options


Bundle = dict[str, Annotated[float, Field(ge=0)]]


class PlacementGroupConfig(BaseModel):
    """Resources of one replica's workers: one bundle for each worker, the replica's own process in the first."""

    model_config = ConfigDict(extra="forbid")

    bundles: Annotated[list[Bundle], Field(min_length=1)] | None = Field(
        default=None, description="Resources of each worker, as Ray names them (`GPU`, `CPU`, ...)."
    )
    bundle_per_worker: Bundle | None = Field(
        default=None, description="The same bundle for every worker, instead of `bundles`."
    )
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] | None = Field(
        default=None, description="Ray's placement strategy. Null: STRICT_PACK, or PACK with pipeline parallelism."
    )

    def expand(self, workers: int, actor: RayActorOptions) -> list[dict[str, float]]:
        """Bundles of a replica with so many workers; the first also holds what its own process reserves."""
        own = {**(actor.resources or {}), **({"memory": actor.memory} if actor.memory else {})}
        if self.bundles is not None:
            first, *rest = (dict(bundle) for bundle in self.bundles)
        elif self.bundle_per_worker is not None:
            first, *rest = (dict(self.bundle_per_worker) for _ in range(workers))
        else:
            first, *rest = ({"GPU": 1, "CPU": max(1, actor.num_cpus or 0) if i == 0 else 1} for i in range(workers))
        return [{**own, **first}, *rest]

    def problems(self, workers: int, device: str, deployment: DeploymentConfig) -> list[Problem]:
        """Why these bundles cannot hold a replica with so many workers."""
        path = "placement_group_config"
        if device == "cpu":
            allowed = "null with the CPU build of vLLM"
            remedy = "remove it; `deployment_config.ray_actor_options` reserves CPUs"
            return [Problem(path, "a CPU replica has one worker", self.model_dump(exclude_none=True), allowed, remedy)]
        if self.bundles is not None and self.bundle_per_worker is not None:
            allowed = "one of bundles and bundle_per_worker"
            return [Problem(f"{path}.bundles", "bundle_per_worker is set as well", self.bundles, allowed, "remove one")]
        key = "bundle_per_worker" if self.bundle_per_worker is not None else "bundles"
        bundles = self.expand(workers, deployment.ray_actor_options)
        with_gpu = sum(1 for bundle in bundles if bundle.get("GPU", 0) > 0)
        problems = []
        if with_gpu != workers or not bundles[0].get("GPU"):
            what = f"{with_gpu} bundles with a GPU for {workers} workers (tensor x pipeline parallel size)"
            allowed = f"{workers} bundles with a GPU, the first among them"
            remedy = "give each worker one bundle with `GPU: 1`, or remove the section"
            problems.append(Problem(f"{path}.{key}", what, getattr(self, key), allowed, remedy))
        cpus = deployment.ray_actor_options.num_cpus
        needed = 1 if cpus is None else cpus
        if bundles[0].get("CPU", 0) < needed:
            what = "the replica's own process does not fit the first bundle"
            allowed = f"CPU >= {needed} in the first bundle"
            remedy = f"set `CPU: {needed}` there, or lower `deployment_config.ray_actor_options.num_cpus`"
            problems.append(Problem(f"{path}.{key}", what, getattr(self, key), allowed, remedy))
        return problems


class CpuConfig(BaseModel):
    """Engine on CPU; without effect on GPU."""

    model_config = ConfigDict(extra="forbid")

    threads_per_replica: Annotated[int, Field(ge=1, le=1024, strict=True)] | Literal["auto"] = Field(
        default="auto",
        description="Engine threads of a replica, each bound to one core. `auto`: the machine's cores but one (for "
        "ingress and Ray) divided by the replicas, at least one.",
        json_schema_extra={"unit": "threads"},
    )
    kv_cache_mib: int = Field(
        default=256,
        ge=16,
        le=1 << 20,
        strict=True,
        description="KV cache of a replica, unless engine_kwargs.kv_cache_memory_bytes is set.",
        json_schema_extra={"unit": "MiB"},
    )


def check_runtime_env(value: dict[str, Any]) -> None:
    """Refuse what Ray would refuse only when the first replica starts."""
    known = sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_"))
    problems = [
        Problem(key, "unknown key", got, ", ".join(known), suggestion(key, known) + "rename or remove it")
        for key, got in value.items()
        if key not in known
    ]
    variables = value.get("env_vars") or {}
    if not isinstance(variables, dict):
        remedy = 'write NAME: "value" below it'
        problems.append(Problem("env_vars", "wrong type", variables, "mapping of name to text", remedy))
    else:
        problems += [
            Problem(f"env_vars.{name}", "wrong type", got, "text", f'put it in quotes: "{got}"')
            for name, got in variables.items()
            if not isinstance(got, str)
        ]
    if problems:
        raise Refused(*problems)
