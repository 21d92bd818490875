"""Shapes of a Ray Serve LLM file that mean the same here: `llm_configs` with one entry, front-end engine_kwargs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.config.errors import ConfigError, Problem
from app.config.ingress import IngressConfig

_LIST = "llm_configs"


def unwrap(raw: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The arguments as one flat mapping, and the path prefix of each key that came out of `llm_configs[0]`."""
    if not isinstance(raw, Mapping):
        remedy = "write the keys of the reference page below `args`"
        raise ConfigError([Problem("args", "not a mapping", raw, "mapping of keys", remedy)])
    args = dict(raw)
    if _LIST not in args:
        return _front_end_keys(args), {}
    entries = args.pop(_LIST)
    if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], Mapping):
        got = len(entries) if isinstance(entries, list) else entries
        remedy = "write one Serve application (name, route_prefix) for each model"
        what = "one Tidegate application serves one model"
        raise ConfigError([Problem(_LIST, what, got, "a list of one mapping", remedy)])
    entry = dict(entries[0])
    if twice := sorted(args.keys() & entry.keys()):
        where = f"also set in {_LIST}[0]"
        raise ConfigError([Problem(key, where, args[key], "one of the two places", "remove one") for key in twice])
    return _front_end_keys({**args, **entry}), dict.fromkeys(entry, f"{_LIST}[0].")


def _front_end_keys(args: dict[str, Any]) -> dict[str, Any]:
    """Serve LLM takes vLLM's front-end arguments in engine_kwargs; here they belong to `ingress`."""
    engine, ingress = args.get("engine_kwargs"), args.get("ingress") or {}
    if not isinstance(engine, Mapping) or not isinstance(ingress, Mapping):
        return args
    moved = {key: engine[key] for key in IngressConfig.FRONT_END if key in engine}
    if twice := sorted(moved.keys() & ingress.keys()):
        what, allowed = "also set in ingress", "one of the two places"
        raise ConfigError(
            Problem(f"engine_kwargs.{key}", what, moved[key], allowed, f"keep `ingress.{key}`") for key in twice
        )
    if not moved:
        return args
    return {
        **args,
        "engine_kwargs": {k: v for k, v in engine.items() if k not in moved},
        "ingress": {**ingress, **moved},
    }
