"""Ingress deployment: vLLM's OpenAI app over the fleet, and the same serving classes behind Python handles."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.config import ConfigError, load_config
from app.config.keys import read_keys
from app.fleet_client import FleetEngineClient
from app.gate import Gate
from app.metrics import Promise, RequestMetrics
from app.python_api import PythonApi
from app.reception import Reception
from app.request_log import RequestLog
from app.streams import Failover
from app.vllm_compat import build_openai_app, ingress_config, serve_arguments
from deployments import tracing
from deployments.router import FleetRouter
from deployments.routing import find_router
from deployments.serve_replica import http_host

_LAST_SPANS_S = 2.0  # for a collector to take them
_REPORTED = (
    *("state", "running", "waiting", "running_by_tier", "waiting_by_tier"),
    *("free_blocks", "total_blocks", "queued_tokens", "preemptions"),
)


@serve.ingress()
class Ingress:
    """Tokenises, routes, detokenises. Holds no weights; run as many replicas as the token rate needs."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        raw_config: dict[str, Any],
        model_path: str,
        engines: DeploymentHandle,
        coordinator: DeploymentHandle,
        admin: DeploymentHandle | None = None,  # not called: what nobody is bound to is no part of the application
    ) -> None:
        config = load_config(raw_config)
        if (problem := config.api_keys.public_problem(http_host())) is not None:
            raise ConfigError([problem])
        keys = read_keys(config.api_keys, config.tiers.names, os.environ)
        tracing.start(config.tracing.settings(), "Ingress", serve.get_replica_context().replica_id.unique_id)
        self._reception = Reception(config, keys)
        self._log = None
        if config.ingress.request_log is not None:
            self._log = RequestLog(config.ingress.request_log, config.ingress.request_log_mib << 20)
        self._figures = RequestMetrics(
            [Promise(level.name, level.ttft_slo_s, level.tpot_slo_s) for level in config.tiers.levels],
            config.model_loading_config.model_id,
            {key.tenant for key in keys},
        )
        arguments = serve_arguments(config.engine_args(model_path), config.ingress.front_end())
        self._config = config
        self._engines = engines
        self._coordinator = coordinator
        # Serve builds a handle's router with its first call; the fleet's state is wanted before the first request.
        engines._init()
        self._client = FleetEngineClient(
            ingress_config(arguments),
            engines,
            ray.util.get_node_ip_address(),
            has_replica=self._has_replica,
            observe=self._observe,
            failover=Failover(config.failover.max_attempts, config.failover.timeout_s),
            queue=self._reception.queue,
            default_tier=config.tiers.default_tier,
            timeout_s=config.ingress.request_timeout_s,
            log=self._log,
            figures=self._figures,
        )
        self._figures.start(self._reception.queue.waiting)
        self._app = await build_openai_app(arguments, self._client)
        self._python = PythonApi(self._app.state, self._client, self._reception)

    def __serve_build_asgi_app__(self) -> Gate:
        """The public HTTP app (Serve calls this once the constructor is done)."""
        return Gate(self._app, self._has_replica, round(self._config.ingress.max_body_mib * 2**20), self._reception)

    def _router(self) -> FleetRouter | None:
        return find_router(self._engines.deployment_name)

    def _has_replica(self) -> bool:
        if self._config.deployment_config.may_be_empty:
            return True  # a request waits for the replica that it makes Serve start
        router = self._router()
        return router is not None and bool(router.table.ids)

    def _observe(self, prompt_tokens: int, output_tokens: int) -> None:
        if (router := self._router()) is not None:
            router.observe(prompt_tokens, output_tokens)

    # Python handles: serve.get_app_handle("tidegate")

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """One chat completion: an OpenAI chat request in, the response object out."""
        return await self._python.chat(body)

    async def chat_stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed chat completion (call with `handle.options(stream=True)`)."""
        async for chunk in self._python.chat_stream(body):
            yield chunk

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One text completion: an OpenAI completion request in, the response object out."""
        return await self._python.complete(body)

    async def complete_stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a streamed text completion (call with `handle.options(stream=True)`)."""
        async for chunk in self._python.complete_stream(body):
            yield chunk

    async def generate_tokens(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        """Token ids in, token ids out: `{"token_ids", "text", "finish_reason", "stop_reason"}`.

        `sampling` are vLLM's sampling parameters and `tier`, a tier's name or number.
        """
        return await self._python.generate_tokens(prompt, sampling)

    async def generate_tokens_stream(self, prompt: list[int], **sampling: Any) -> AsyncIterator[dict[str, Any]]:
        """As `generate_tokens`, in pieces of newly generated ids (call with `handle.options(stream=True)`)."""
        async for piece in self._python.generate_tokens_stream(prompt, sampling):
            yield piece

    async def fleet_state(self) -> dict[str, dict[str, Any]]:
        """The last load report of each replica as this ingress sees it: blocks, requests (by tier too), tokens, state.

        `freeness`: how far the replica is from full, in the measures of policies/freeness.py.
        """
        router = self._router()
        if router is None:
            return {}
        freeness = router.freeness()
        return {
            name: {**{field: getattr(report, field) for field in _REPORTED}, "freeness": freeness.get(name)}
            for name, report in list(router.reports.items())
        }

    async def migration_state(self) -> dict[str, Any]:
        """The coordinator's freeness table, the moves under way, and how many ended how since it started."""
        return await self._coordinator.state.remote()

    async def __del__(self) -> None:
        self._figures.close()
        self._client.close()
        if self._log is not None:
            self._log.close()
        await asyncio.to_thread(tracing.stop, _LAST_SPANS_S)
