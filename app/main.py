"""Entry point of the Serve application: `import_path: app.main:build`."""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.admin.deployment import Admin
from app.admin.status import about
from app.config import TidegateConfig, check_keys, load_config
from app.ingress import Ingress
from app.model import resolve_model
from deployments.coordinator import Coordinator
from deployments.replica import EngineReplica
from deployments.settings import ReplicaSettings


def build(args: dict[str, Any]) -> Application:
    """Build the application from `applications[].args` of the Serve config file.

    Raises ConfigError, naming field, range and remedy, before anything starts.
    """
    config = load_config(args)
    check_keys(config)
    model_path = resolve_model(config.model_loading_config.source)
    engines = serve.deployment(EngineReplica, name="EngineReplica").options(
        **config.deployment_options(),
        request_router_config=RequestRouterConfig(
            request_router_class="deployments.router:FleetRouter",
            request_router_kwargs=router_settings(config),
            request_routing_stats_period_s=3600,  # load reports come over ZMQ; Serve need not poll
        ),
    )
    settings = ReplicaSettings(
        engine_args=config.engine_args(model_path),
        scheduling=config.scheduling.model_dump(),
        balancing=config.balancing.model_dump(),
        tiers=config.tiers.spec(),
        threads=_threads(config),
        migration=config.migration.settings(),
        graceful_shutdown_timeout_s=config.deployment_config.graceful_shutdown_timeout_s,
        stall_s=config.failover.stall_s,
        tracing=config.tracing.settings(),
    )
    fleet = engines.bind(settings)
    coordinator = serve.deployment(Coordinator, name="Coordinator").options(**config.coordinator_options())
    ingress = serve.deployment(Ingress, name="Ingress").options(**config.ingress_options())
    admin = serve.deployment(Admin, name="Admin").options(**config.admin_options())
    coordinates = coordinator.bind(fleet, settings.migration, settings.tiers)
    watches = admin.bind(config.admin, about(config), coordinates) if config.admin.enabled else None
    return ingress.bind(args, model_path, fleet, coordinates, watches)


def router_settings(config: TidegateConfig) -> dict[str, Any]:
    """Arguments of `deployments.router.FleetRouter.initialize_state`."""
    settings: dict[str, Any] = {"balancing": config.balancing.model_dump(), "tiers": config.tiers.spec()}
    if config.deployment_config.may_be_empty:
        settings["wait_for_replica_s"] = config.ingress.cold_start_s
    return settings


def _threads(config: TidegateConfig) -> int | None:
    """Engine threads of one CPU replica; by default the replicas share all cores but one, left to ingress and Ray."""
    if not config.is_cpu:
        return None
    if isinstance(config.cpu.threads_per_replica, int):
        return config.cpu.threads_per_replica
    return max(1, ((os.cpu_count() or 1) - 1) // config.deployment_config.fleet_size)
