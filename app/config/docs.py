"""The reference page of the configuration, written from the schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.config.admin import AdminConfig
from app.config.deployment import CpuConfig, DeploymentConfig, PlacementGroupConfig, RayActorOptions
from app.config.engine import CPU_DEFAULTS, OWNED, RANGES
from app.config.errors import allowed_values, bounds_text, field_names
from app.config.ingress import FailoverConfig, IngressConfig
from app.config.keys import ApiKeysConfig, KeyEntry
from app.config.migration import MigrationConfig
from app.config.model import ModelLoadingConfig
from app.config.policy import BalancingConfig, PolicyConfig, SchedulingConfig
from app.config.schema import TidegateConfig, UserConfig
from app.config.tiers import HeadroomConfig, TierLevel, TiersConfig
from app.config.tracing import TracingConfig

_INTRO = """\
# Configuration

<!-- Generated: python -m app.config > docs/configuration.md -->

Everything below is written under `applications[].args` of the Serve file (`serve_config.yaml`). All keys are optional.
An unknown key or a value out of range stops `serve run` before any replica starts, with one line per problem:

```text
ingress.num_replicas: out of range (got 0); allowed: integer >= 1 and <= 1024; set an allowed value or ...
```

`python -m app.config FILE` checks a Serve file without starting anything.

What changes without a restart stands under `deployments` of the same application, see [user_config](#user_config).
"""
_SERVE_LLM = """\
## Coming from Ray Serve LLM

The keys of an `LLMConfig` keep their names. `llm_configs` with one entry is accepted as it is; front-end arguments in
`engine_kwargs` (tool and reasoning parser, chat template, ...) are taken for those of [ingress](#ingress). What remains
is refused with its remedy:
"""
_USER_CONFIG = """\
`user_config` of the deployment `EngineReplica`. `serve deploy` of a file in which only this changed applies it to the
running replicas and routers; a change below `args` restarts the replicas. What is given here wins over `args`.

```yaml
  deployments:
    - name: EngineReplica
      user_config:
        scheduling: {policy: larry, alpha: 2.0}
        balancing: {policy: tiered_sal, beta: 6.5}
```
"""


def reference() -> str:
    """The page as Markdown."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield _INTRO
    yield from _fields("args", TidegateConfig)
    yield from _fields("model_loading_config", ModelLoadingConfig)
    yield from _engine_kwargs()
    yield from _policies("scheduling", SchedulingConfig)
    yield from _policies("balancing", BalancingConfig)
    yield from _tiers()
    yield from _fields("api_keys", ApiKeysConfig)
    yield "A key in that list (`python -m app.keys new` makes one, see [tiers and keys](tiers.md)):\n"
    yield from _rows(KeyEntry)
    yield from _fields("deployment_config", DeploymentConfig)
    yield from _fields("deployment_config.ray_actor_options", RayActorOptions)
    yield from _fields("ingress", IngressConfig)
    yield from _fields("failover", FailoverConfig)
    yield from _fields("migration", MigrationConfig)
    yield "What moves, when, and what happens when something dies meanwhile: [migration](migration.md).\n"
    yield from _fields("admin", AdminConfig)
    yield "What the page shows, and its actions: [operations](operations.md).\n"
    yield from _fields("tracing", TracingConfig)
    yield "Which spans there are and what they say: [operations](operations.md#traces).\n"
    yield from _fields("placement_group_config", PlacementGroupConfig)
    yield from _fields("cpu", CpuConfig)
    yield from _fields("user_config", UserConfig)
    yield _USER_CONFIG
    yield _SERVE_LLM
    moved = [(f"`{key}`", _sentence(text)) for key, text in TidegateConfig.MOVED.items()]
    moved += [(f"`deployment_config.{key}`", _sentence(text)) for key, text in DeploymentConfig.MOVED.items()]
    yield from _table(("key", "remedy"), moved)


def _fields(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## {title}\n"
    yield from _rows(model)


def _rows(model: type[BaseModel]) -> Iterator[str]:
    yield from _table(
        ("key", "type and range", "unit", "default", "meaning"),
        [
            (f"`{name}`", allowed_values(field), _unit(field), _default(field), field.description or "")
            for name, field in field_names(model).items()
        ],
    )


def _tiers() -> Iterator[str]:
    yield from _fields("tiers", TiersConfig)
    yield "A tier of `levels`:\n"
    yield from _rows(TierLevel)
    yield "`headroom`:\n"
    yield from _rows(HeadroomConfig)
    yield "The default table:\n"
    defaults = TiersConfig.model_validate({})
    yield from _table(
        ("level", "service_tiers", "headroom by the formula"),
        [
            (f"`{level.name}`", ", ".join(f"`{v}`" for v in level.service_tiers) or "none", f"{share:.3f}")
            for level, share in zip(defaults.levels, defaults.headroom_shares, strict=True)
        ],
    )


def _engine_kwargs() -> Iterator[str]:
    yield "## engine_kwargs\n"
    yield "Every field of vLLM's `AsyncEngineArgs`, with vLLM's default. On CPU the defaults are:\n"
    yield from _table(
        ("key", "default on CPU"), [(f"`{key}`", f"`{_yaml(value)}`") for key, value in CPU_DEFAULTS.items()]
    )
    yield "Checked before the engine starts (`block_size` must also be a multiple of 32 on CPU):\n"
    yield from _table(("key", "range"), [(f"`{key}`", bounds_text(*limits)) for key, limits in RANGES.items()])
    yield "Refused, because Tidegate decides them:\n"
    yield from _table(("key", "remedy"), [(f"`{key}`", _sentence(text)) for key, text in OWNED.items()])


def _policies(title: str, model: type[PolicyConfig]) -> Iterator[str]:
    yield from _fields(title, model)
    yield "Policies and the parameters that may stand beside `policy`:\n"
    rows = []
    for name in model.REGISTRY.names():
        meaning = _first_sentence(type(model.REGISTRY.make(name)).__doc__ or "")
        parameters = model.REGISTRY.parameters(name).items()
        rows.append(
            (f"`{name}`", ", ".join(f"`{key}` ({_yaml(value)})" for key, value in parameters) or "none", meaning)
        )
    yield from _table(("policy", "parameters (default)", "meaning"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


def _unit(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return "its keys' defaults"
    if isinstance(default, list) and default:
        return "the table below"
    return f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
