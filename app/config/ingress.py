"""The sections `ingress` and `failover`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from app.config.engine import parser_names
from app.config.errors import Problem, Refused, suggestion

_SECONDS: JsonDict = {"unit": "s"}
_REQUESTS: JsonDict = {"unit": "requests"}


class IngressConfig(BaseModel):
    """The OpenAI API in front of the replicas; names as in `vllm serve` where the meaning is the same."""

    model_config = ConfigDict(extra="forbid")
    MOVED: ClassVar[dict[str, str]] = {
        "max_logprobs": "set `engine_kwargs.max_logprobs` instead",
        "max_model_len": "set `engine_kwargs.max_model_len` instead",
        "host": "set `http_options.host` of the Serve file instead",
        "port": "set `http_options.port` of the Serve file instead",
        "request_timeout": "set `request_timeout_s`",
    }
    # arguments of vLLM's front end, which a Serve LLM file has in engine_kwargs
    FRONT_END: ClassVar[tuple[str, ...]] = (
        "tool_call_parser",
        "enable_auto_tool_choice",
        "tool_parser_plugin",
        "exclude_tools_when_tool_choice_none",
        "reasoning_parser",
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "trust_request_chat_template",
        "response_role",
        "return_tokens_as_token_ids",
        "enable_prompt_tokens_details",
        "enable_force_include_usage",
        "sse_keep_alive_interval",
        "enable_log_requests",
        "max_log_len",
    )

    num_replicas: int = Field(
        default=1,
        ge=1,
        le=1024,
        strict=True,
        description="Ingress processes; each tokenises, detokenises and serves HTTP.",
        json_schema_extra={"unit": "replicas"},
    )
    num_cpus: float = Field(
        default=0.2,
        gt=0,
        le=64,
        strict=True,
        description="CPUs that Ray reserves for each.",
        json_schema_extra={"unit": "cores"},
    )
    max_queued_requests: int = Field(
        default=1000,
        ge=1,
        le=1_000_000,
        strict=True,
        description="Requests of one ingress process that wait for their first token; one more is answered 429 with "
        "Retry-After.",
        json_schema_extra=_REQUESTS,
    )
    cold_start_s: float = Field(
        default=120.0,
        ge=1,
        le=3600,
        strict=True,
        description="Where the fleet may have no replica (`min_replicas: 0`), the first requests wait so long for one "
        "to start, and once more, before they are answered 503 with Retry-After.",
        json_schema_extra=_SECONDS,
    )
    max_ongoing_requests: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        strict=True,
        description="Requests and open streams that Serve hands to one ingress process at once.",
        json_schema_extra=_REQUESTS,
    )
    request_timeout_s: Annotated[float, Field(gt=0, strict=True)] | None = Field(
        default=None,
        description="Longest life of a request, queue and stream together; then it is cancelled. Null: no limit.",
        json_schema_extra=_SECONDS,
    )
    max_body_mib: int = Field(
        default=16,
        ge=1,
        le=1024,
        strict=True,
        description="Largest request body; a larger one is answered 413.",
        json_schema_extra={"unit": "MiB"},
    )
    sse_keep_alive_interval: int = Field(
        default=0,
        ge=0,
        le=3600,
        strict=True,
        description="Comment line sent in an idle stream this often; 0: never.",
        json_schema_extra=_SECONDS,
    )
    tool_call_parser: str | None = Field(
        default=None, description="vLLM's parser of the model's tool calls (`hermes`, `llama3_json`, ...)."
    )
    enable_auto_tool_choice: bool = Field(
        default=False, strict=True, description="Let the model decide to call tools (`tool_choice: auto`)."
    )
    tool_parser_plugin: str | None = Field(
        default=None, description="Python file that registers further tool-call parsers."
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        default=False, strict=True, description="Leave tools out of the prompt when `tool_choice` is `none`."
    )
    reasoning_parser: str | None = Field(
        default=None, description="vLLM's parser of the model's reasoning (`deepseek_r1`, `qwen3`, ...)."
    )
    chat_template: str | None = Field(
        default=None, description="Chat template, or the file that holds it. Null: the tokenizer's."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        default="auto", description="Form in which message content reaches the template."
    )
    default_chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Template arguments of every request; those of the request win."
    )
    trust_request_chat_template: bool = Field(
        default=False, strict=True, description="Accept a chat template from the request. It runs on the server."
    )
    response_role: str = Field(default="assistant", min_length=1, description="Role of the generated message.")
    return_tokens_as_token_ids: bool = Field(
        default=False, strict=True, description="Name tokens `token_id:N` in log-probabilities."
    )
    enable_prompt_tokens_details: bool = Field(
        default=False, strict=True, description="Report cached prompt tokens in `usage`."
    )
    enable_force_include_usage: bool = Field(
        default=False, strict=True, description="Report `usage` at the end of every stream."
    )
    request_log: Annotated[str, Field(pattern=r"^[/~]")] | None = Field(
        default=None,
        description="File to which a line of JSON is appended for each finished request, prompt token ids included: "
        "private data, meant for training the length predictor. Absolute path. Null: off.",
    )
    request_log_mib: int = Field(
        default=256,
        ge=1,
        le=1 << 20,
        strict=True,
        description="Size at which `request_log` ends.",
        json_schema_extra={"unit": "MiB"},
    )
    enable_log_requests: bool = Field(default=False, strict=True, description="Log each request's parameters.")
    max_log_len: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        default=None,
        description="Prompt characters or token ids per logged request. Null: all.",
        json_schema_extra={"unit": "characters"},
    )

    def front_end(self) -> dict[str, Any]:
        """The arguments of vLLM's front end in this section that are not null, by vLLM's names."""
        return {name: value for name in self.FRONT_END if (value := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def _parsers_exist(self) -> IngressConfig:
        problems = []
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            allowed = "a tool-call parser of vLLM"
            remedy = "set it to the parser of your model, or remove `enable_auto_tool_choice`"
            problems.append(Problem("tool_call_parser", "needed by enable_auto_tool_choice", None, allowed, remedy))
        if self.tool_call_parser and not self.tool_parser_plugin:
            problems += _unknown_parser("tool_call_parser", self.tool_call_parser, parser_names("tool_parsers"))
        if self.reasoning_parser:
            problems += _unknown_parser("reasoning_parser", self.reasoning_parser, parser_names("reasoning"))
        if problems:
            raise Refused(*problems)
        return self


def _unknown_parser(field: str, name: str, names: frozenset[str]) -> list[Problem]:
    if name in names:
        return []
    remedy = suggestion(name, names) + "use a name of vLLM"
    return [Problem(field, "unknown parser", name, ", ".join(sorted(names)), remedy)]


class FailoverConfig(BaseModel):
    """A sequence whose replica dies goes on elsewhere, after the tokens that the client has."""

    model_config = ConfigDict(extra="forbid")

    max_attempts: int = Field(
        default=3,
        ge=1,
        le=100,
        strict=True,
        description="Times a sequence is sent without getting a token further; 1: never again.",
        json_schema_extra={"unit": "sends"},
    )
    timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        strict=True,
        description="How long a sequence whose replica failed is kept while no other can take it.",
        json_schema_extra=_SECONDS,
    )
    stall_s: Annotated[float, Field(ge=1, le=86_400, strict=True)] | None = Field(
        default=60.0,
        description="A replica whose engine has requests but makes no step for so long counts as dead and is replaced; "
        "its first steps, which may compile, have ten times as long. Null: never.",
        json_schema_extra=_SECONDS,
    )
