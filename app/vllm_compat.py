"""The only module of the ingress that touches vLLM's internals (docs/structures.md lists them, contract-tested)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "EngineClient",
    "EngineCoreRequest",
    "ErrorResponse",
    "GracefulHTTPError",
    "InputProcessor",
    "OutputProcessor",
    "ParentRequest",
    "RequestOutput",
    "RequestOutputCollector",
    "RequestOutputKind",
    "SamplingParams",
    "VLLMClientError",
    "VLLMValidationError",
    "build_openai_app",
    "extract_prompt_components",
    "ingress_config",
    "openai_error",
    "renderer_from_config",
    "serve_arguments",
    "tokens_input",
]

TASKS = ("generate",)


def serve_arguments(engine_args: dict[str, Any], front_end: dict[str, Any]) -> Namespace:
    """The arguments that `vllm serve` would have parsed: its defaults, then the engine's and the front end's settings.

    Raises ValueError or TypeError for combinations that `vllm serve` refuses.
    """
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in {**engine_args, **front_end}.items():
        if not hasattr(arguments, name):
            raise ValueError(f"vLLM's server has no argument {name!r}")
        setattr(arguments, name, value)
    validate_parsed_serve_args(arguments)
    return arguments


def ingress_config(arguments: Namespace) -> VllmConfig:
    """The part of vLLM's config that the serving classes read; no device is asked, no weights are loaded."""
    engine_args = AsyncEngineArgs.from_cli_args(arguments)
    model_config = engine_args.create_model_config()
    model_config.quantization = None
    return VllmConfig(
        model_config=model_config, structured_outputs_config=engine_args.create_structured_outputs_config()
    )


async def build_openai_app(arguments: Namespace, client: EngineClient) -> FastAPI:
    """vLLM's FastAPI app with its OpenAI and Anthropic serving classes over `client`."""
    app = build_app(arguments, TASKS, client.model_config)
    await init_app_state(client, app.state, arguments, TASKS)
    for model in app.state.openai_serving_models.base_model_paths:
        model.model_path = model.name  # /v1/models would show where the weights lie on this machine
    return app


def openai_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and OpenAI-shaped body that vLLM's own table gives an exception."""
    response = create_error_response(error)
    return response.error.code, response.model_dump()
