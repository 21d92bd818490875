"""The section `model_loading_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.config.errors import Problem, Refused

DEFAULT_MODEL_ID = "smollm2-135m-instruct"
DEFAULT_SOURCE = "default"


class ModelLoadingConfig(BaseModel):
    """Which model is served, and under which name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_id: str = Field(
        min_length=1, pattern=r"^\S+$", description="Name by which clients address the model (`model` of a request)."
    )
    model_source: str | None = Field(
        default=None,
        min_length=1,
        description="Where the weights are: `default` (the bundled SmolLM2-135M-Instruct), a Hugging Face id or a "
        "local folder. Null: `model_id` is the Hugging Face id.",
    )
    tokenizer_source: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face id or local folder of the tokenizer. Null: that of the model.",
    )

    @property
    def source(self) -> str:
        """`default`, a Hugging Face id or a local folder, never null."""
        return self.model_source or (DEFAULT_SOURCE if self.model_id == DEFAULT_MODEL_ID else self.model_id)

    @field_validator("model_source", mode="before")
    @classmethod
    def _reachable(cls, value: Any) -> Any:
        if isinstance(value, Mapping) or (isinstance(value, str) and "://" in value):
            allowed, remedy = "`default`, a Hugging Face id or a local folder", "download it and give the folder"
            raise Refused(Problem("", "bucket sources are not supported", value, allowed, remedy))
        return value
