"""The section `tracing`: OpenTelemetry spans."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.config.errors import Problem, Refused
from deployments.settings import TracingSettings

TRACES_PATH = "/v1/traces"  # of OTLP/HTTP


class TracingConfig(BaseModel):
    """Spans of requests, for a collector: docs/operations.md."""

    model_config = ConfigDict(extra="forbid")

    exporter: Literal["none", "console", "otlp"] = Field(
        default="none",
        description="Where spans go. `none`: there are none; `console`: a line of JSON each on the standard output of "
        "the process that made it; `otlp`: to a collector, by OTLP over HTTP.",
    )
    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = Field(
        default=None,
        description=f"URL of the collector; without a path `{TRACES_PATH}` is meant. Null: what the environment says "
        "(`OTEL_EXPORTER_OTLP_ENDPOINT`), else `http://localhost:4318`. Headers are taken from "
        "`OTEL_EXPORTER_OTLP_HEADERS`.",
    )
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        strict=True,
        description="Share of the requests that are recorded; one that comes with a `traceparent` is recorded if that "
        "says so.",
    )
    service_name: str = Field(default="tidegate", min_length=1, description="`service.name` of the spans.")

    @model_validator(mode="after")
    def _fits_together(self) -> TracingConfig:
        if self.endpoint is not None and self.exporter != "otlp":
            what, remedy = f"the exporter `{self.exporter}` has none", "set `exporter: otlp` or remove the line"
            raise Refused(Problem("endpoint", what, self.endpoint, "null unless exporter is otlp", remedy))
        return self

    def settings(self) -> TracingSettings | None:
        """What ingresses and replicas are told; None: no spans."""
        if self.exporter == "none":
            return None
        endpoint = self.endpoint
        if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + TRACES_PATH
        return TracingSettings(self.exporter, endpoint, self.sample_ratio, self.service_name)
