"""What a valid Serve file means: `tidegate config check FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from app.config import TidegateConfig, load_config
from app.config.files import IMPORT_PATH
from app.config.policy import PolicyConfig


def explain(file: Path) -> list[dict[str, Any]]:
    """For each Tidegate application of a valid file: what was given and what follows from it."""
    content = yaml.safe_load(file.read_text("utf-8"))
    http = content.get("http_options") or {}
    return [
        _application(application, load_config(application.get("args") or {}), http)
        for application in content["applications"]
        if application["import_path"] == IMPORT_PATH
    ]


def _application(application: dict[str, Any], config: TidegateConfig, http: dict[str, Any]) -> dict[str, Any]:
    live = next(
        (d.get("user_config") or {} for d in application.get("deployments") or [] if d["name"] == "EngineReplica"), {}
    )
    deployment = config.deployment_config
    return {
        "name": application.get("name", "default"),
        "model": config.model_id,
        "device": config.device,
        "api": f"http://{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}{application.get('route_prefix', '/')}",
        "api_keys": config.api_keys.on,
        "admin": f"http://{config.admin.host}:{config.admin.port}/status" if config.admin.enabled else None,
        "replicas": {
            "at_most": deployment.fleet_size,
            "autoscaling": deployment.autoscaling(),
            "workers_of_each": config.world_size,
            "kv_cache_mib_of_each": _kv_mib(config),
            "options": config.replica_actor_options(),
        },
        "ingress_replicas": config.ingress.num_replicas,
        "tiers": _tiers(config),
        "scheduling": _policy(live.get("scheduling"), config.scheduling, type(config.scheduling)),
        "balancing": _policy(live.get("balancing"), config.balancing, type(config.balancing)),
        "migration": config.migration.model_dump(),
        "failover": config.failover.model_dump(),
        "engine_kwargs": config.engine_args("MODEL"),
        "given": sorted(config.model_fields_set),
    }


def _kv_mib(config: TidegateConfig) -> float | None:
    """None: as much as vLLM finds free on the GPU."""
    given = config.engine_args("MODEL").get("kv_cache_memory_bytes")
    return None if given is None else int(given) / 2**20


def _tiers(config: TidegateConfig) -> list[dict[str, Any]]:
    kv_mib, shares = _kv_mib(config), config.tiers.headroom_shares
    return [
        {
            "tier": level.name,
            "priority": number,
            "default": number == config.tiers.default_tier,
            "headroom_share": share,
            "headroom_mib": None if kv_mib is None else share * kv_mib,
            **level.model_dump(exclude={"name", "headroom"}),
        }
        for number, (level, share) in enumerate(zip(config.tiers.levels, shares, strict=True))
    ]


def _policy(live: dict[str, Any] | None, args: PolicyConfig, section: type[PolicyConfig]) -> dict[str, Any]:
    """The policy in force with every parameter, and where it is written."""
    chosen = section.model_validate(live) if live else args
    by_default = {
        **section.REGISTRY.parameters(chosen.policy),
        **{name: field.default for name, field in section.model_fields.items() if name != "policy"},
    }
    given = {name: value for name, value in chosen.model_dump(exclude_unset=True).items() if name != "policy"}
    written = "user_config" if live else "args" if args.model_fields_set else "nowhere: the default"
    return {
        "policy": chosen.policy,
        "parameters": {**by_default, **given},
        "given": sorted(given),
        "written_in": written,
    }


def show(meaning: dict[str, Any], console: Console) -> None:
    """Print what `explain` found."""
    replicas = meaning["replicas"]
    scaling = replicas["autoscaling"]
    fleet = f"{replicas['at_most']} engine replicas"
    if scaling is not None:
        fleet = f"{scaling.get('min_replicas', 1)} to {replicas['at_most']} engine replicas, by load"
    kv = replicas["kv_cache_mib_of_each"]
    lines = [
        f"{meaning['name']}: {meaning['model']} on {meaning['device']}, {fleet}, "
        f"{meaning['ingress_replicas']} ingress replica(s)",
        f"KV cache of a replica: {'what vLLM finds free on the GPU' if kv is None else f'{kv:g} MiB'}; "
        f"workers: {replicas['workers_of_each']}",
        f"API {meaning['api']} ({'with' if meaning['api_keys'] else 'without'} keys), status page "
        f"{meaning['admin'] or 'off'}",
        f"migration {'on' if meaning['migration']['enabled'] else 'only off replicas that drain'}, fail-over after "
        f"{meaning['failover']['max_attempts']} sends at most",
    ]
    for section in ("scheduling", "balancing"):
        policy = meaning[section]
        parameters = ", ".join(
            f"{name} {value}" + ("" if name in policy["given"] else " (default)")
            for name, value in policy["parameters"].items()
        )
        lines.append(
            f"{section}: {policy['policy']}, written in {policy['written_in']}; {parameters or 'no parameters'}"
        )
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    for row in meaning["tiers"]:
        console.print(Text(_tier(row)), soft_wrap=True)


def _tier(row: dict[str, Any]) -> str:
    """A tier in words; what it does not have is left out."""
    mib = row["headroom_mib"]
    kept = f"{100 * row['headroom_share']:.1f} % of the KV cache" + ("" if mib is None else f" ({mib:.0f} MiB)")
    units = {
        "aging_s": "lifted by a tier each {:g} s of waiting",
        "ttft_slo_s": "first token within {:g} s",
        "tpot_slo_s": "each further token within {:g} s",
        "max_queued": "{} wait at most in one ingress",
        "requests_per_minute": "{} requests/min",
        "tokens_per_minute": "{} tokens/min",
    }
    more = [text.format(row[name]) for name, text in units.items() if row[name] is not None]
    if row["service_tiers"]:
        more.append("service_tier " + ", ".join(row["service_tiers"]))
    default = ", the default" if row["default"] else ""
    return f"tier {row['priority']} {row['tier']}{default}: keeps {kept} free; {'; '.join(more)}"
