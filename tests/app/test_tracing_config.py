"""The section `tracing`: off by default, what it refuses, which collector it means."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import ConfigError, load_config
from deployments.settings import TracingSettings


def test_off_by_default() -> None:
    """Without a section there are no spans."""
    assert load_config({}, "cpu").tracing.settings() is None


@pytest.mark.parametrize(
    ("section", "path", "said"),
    [
        ({"exporter": "jaeger"}, "tracing.exporter", "one of none, console, otlp"),
        ({"exporter": "otlp", "endpoint": "collector:4318"}, "tracing.endpoint", "https?://"),
        ({"endpoint": "http://c:4318"}, "tracing.endpoint", "set `exporter: otlp` or remove the line"),
        ({"exporter": "console", "endpoint": "http://c"}, "tracing.endpoint", "null unless exporter is otlp"),
        ({"sample_ratio": 1.5}, "tracing.sample_ratio", ">= 0 and <= 1"),
        ({"service_name": ""}, "tracing.service_name", "not empty"),
        ({"sample_ration": 1.0}, "tracing.sample_ration", "sample_ratio"),
    ],
)
def test_mistakes_are_named(section: dict[str, Any], path: str, said: str) -> None:
    """A value that cannot be meant is refused, with the field and what may stand there."""
    with pytest.raises(ConfigError) as refused:
        load_config({"tracing": section}, "cpu")
    (found,) = refused.value.problems
    assert str(found).startswith(path)
    assert said in str(found)


@pytest.mark.parametrize(
    ("endpoint", "meant"),
    [
        (None, None),
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_endpoints(endpoint: str | None, meant: str | None) -> None:
    """An endpoint without a path is a collector's address, one with a path is taken as it is."""
    section = {"exporter": "otlp", "endpoint": endpoint, "sample_ratio": 0.25, "service_name": "mine"}
    assert load_config({"tracing": section}, "cpu").tracing.settings() == TracingSettings("otlp", meant, 0.25, "mine")
