"""Engine replica: a Serve deployment around one vLLM AsyncLLM. Token ids in, token ids out."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import defaultdict
from typing import Any

import msgspec
import ray
from ray import serve

from deployments.cpu_binding import bind_cpu, bound_cores
from deployments.delta_link import DeltaSender
from deployments.load_page import LoadPage
from deployments.reports import ReportPublisher
from deployments.serve_replica import is_stopping
from deployments.settings import ReplicaSettings, live_settings, policy_spec
from deployments.wire import Outcome, Submit

logger = logging.getLogger(f"ray.serve.{__name__}")

_IDLE_LINK_S = 60.0
_submit_decoder = msgspec.msgpack.Decoder(Submit)


class EngineReplica:
    """Runs one engine; each `generate` call is one sequence whose tokens leave by the delta link."""

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        engine_args = settings.engine_args
        if settings.threads is not None:
            cores = bound_cores(context.rank.local_rank, settings.threads, os.cpu_count() or 1)
            engine_args = bind_cpu(engine_args, cores)
        # vLLM reads its environment when imported.
        from deployments.engine import start_engine

        self._page = LoadPage.create(f"tidegate-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._engine = start_engine(engine_args, policy_spec(settings.scheduling), self._page.name, settings.tiers)
        self._page.unlink()  # both sides have it mapped: no file is left, however this replica ends
        self._links = DeltaSender(self._ingress_lost)
        self._calls: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # by the ingress that they reply to
        self._reports = ReportPublisher(self._page, self._replica_id, ray.util.get_node_ip_address())
        self._reports.set_settings(settings.balancing)
        self._watch = asyncio.get_running_loop().create_task(self._watch_engine())

    def record_replica_metadata(self) -> dict[str, Any]:
        """Announce where this replica publishes its load reports (Serve hands it to every router)."""
        return {"reports": self._reports.endpoint}

    async def generate(
        self,
        frame: bytes,
        *,
        ticket: int,
        prompt_tokens: int,
        tier: int = 0,
        session: int | None = None,
        target_replica: str | None = None,
    ) -> Outcome:
        """Generate one sequence; returns how it ended once its last delta is on its way.

        The keywords are for the router, which reads them off the call. Cancelling the call aborts the sequence.
        """
        from deployments.engine import generate

        submit = _submit_decoder.decode(frame)
        calls, call = self._calls[submit.reply_to], asyncio.current_task()
        assert call is not None
        calls.add(call)
        try:
            outcome = await generate(self._engine, submit, self._links)
        finally:
            calls.discard(call)
            if not calls:
                asyncio.get_running_loop().call_later(_IDLE_LINK_S, self._forget_if_idle, submit.reply_to)
        if outcome.fault == "engine" and self._engine.errored:
            self._die()
        return outcome

    def _ingress_lost(self, reply_to: str) -> None:
        """Abort the sequences of an ingress that is gone: Serve does not cancel the calls of a dead caller."""
        calls = self._calls.pop(reply_to, set())
        logger.warning("ingress %s is gone, aborting its %d sequences", reply_to, len(calls))
        for call in calls:
            call.cancel()

    def _forget_if_idle(self, reply_to: str) -> None:
        if not self._calls.get(reply_to):
            self._calls.pop(reply_to, None)
            self._links.forget(reply_to)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply live settings (`user_config`): the scheduling policy here, the balancing policy in every router.

        Settings that a policy refuses are logged and leave the ones before in force.
        """
        try:
            scheduling, balancing = live_settings(user_config)
            if scheduling:
                self._page.set_policy(policy_spec(scheduling))
            if balancing:
                self._reports.set_settings(balancing)
        except ValueError:
            logger.exception("user_config refused, the settings before it stay in force")

    async def check_health(self) -> None:
        """Raise when the engine is dead, so that Serve replaces this replica."""
        await self._engine.check_health()

    async def _watch_engine(self) -> None:
        """Leave routing at once when Serve stops this replica or the EngineCore dies, with or without requests."""
        draining = False
        while not self._engine.errored:
            if not draining and is_stopping():
                draining = True
                self._reports.set_state("draining")
            await asyncio.sleep(0.05)
        self._die()

    def _die(self) -> None:
        """Tell every router, give pending answers a moment to leave, then end the process (Serve starts another)."""
        logger.error("the engine of replica %s is dead: leaving routing and ending the process", self._replica_id)
        self._reports.set_state("dead")
        self._page.close()
        asyncio.get_running_loop().call_later(0.5, os._exit, 1)

    async def __del__(self) -> None:
        self._watch.cancel()
        self._reports.close()
        self._engine.shutdown()
        self._links.close()
        self._page.close()
