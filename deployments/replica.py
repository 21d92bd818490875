"""Engine replica: a Serve deployment around one vLLM AsyncLLM. Token ids in, token ids out."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from functools import partial
from typing import Any

import msgspec
import ray
from ray import serve

from deployments import tracing
from deployments.autoscaling import FirstTokens, stats
from deployments.cpu_binding import bind_cpu, bound_cores
from deployments.delta_link import DeltaSender
from deployments.gauges import ReplicaGauges
from deployments.load_page import LoadPage
from deployments.migration.engine_kv import EngineKV
from deployments.migration.peers import Peers
from deployments.migration.running import Migration
from deployments.migration.sequences import Sequences
from deployments.parent import TERMINATION_S, Termination
from deployments.reports import ReportPublisher
from deployments.run_spans import traced
from deployments.serve_replica import is_stopping, log_kept
from deployments.settings import ReplicaSettings, live_settings, policy_spec
from deployments.stall import StallWatch
from deployments.wire import Outcome, Submit
from policies.migration.standing import Standing

logger = logging.getLogger(f"ray.serve.{__name__}")

_TO_LEAVE_S = 0.5  # for the last answers of a process that ends
_HAND_BACK_S = 5.0  # before Serve kills a replica that it stops
_LEAVE_S = 10.0  # for the last sequences of a replica that Serve thinks empty: nobody may have attached to them yet
_LAST_SPANS_S = 2.0  # for a collector to take them
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
        tracing.start(settings.tracing, "EngineReplica", self._replica_id)  # before vLLM's, which sets environment
        self._page = LoadPage.anonymous()
        with log_kept():  # vLLM reads its environment when imported: not before this
            from deployments.engine import generate, start_engine

            self._engine = start_engine(engine_args, policy_spec(settings.scheduling), self._page.name, settings.tiers)
        self._termination = Termination()
        self._page.unlink()  # both sides have it mapped
        self._links = DeltaSender(self._ingress_lost)
        self._first_tokens = FirstTokens(settings.tiers.get("ttft_slo_s", ()))
        running, spans = partial(generate, self._engine), tracing.current()
        recorded = traced(running, spans, self._replica_id, lambda submit: self._sequences.fate(submit))
        watched = self._first_tokens.watching(recorded)
        self._sequences = Sequences(watched, self._links.send, self._links.forget, self._replica_id)
        self._reports = ReportPublisher(self._page, self._replica_id, ray.util.get_node_ip_address())
        self._reports.set_settings(settings.balancing)
        kv = EngineKV(self._engine)
        await kv.start()
        self._migration = Migration(
            self._replica_id,
            kv,
            self._sequences,
            Peers(context.deployment, context.app_name),
            settings.migration,
            self._standing,
            lambda: self._engine.errored,
        )
        self._reports.moving = self._migration.destinations
        self._stop_s = max(
            settings.graceful_shutdown_timeout_s - _HAND_BACK_S, settings.graceful_shutdown_timeout_s / 2
        )
        self._stall = StallWatch(settings.stall_s)
        self._watch = asyncio.get_running_loop().create_task(self._watch_engine())
        gauges = ReplicaGauges(self._replica_id, settings.tiers)
        watched_by = gauges.watch(self._page.read, lambda: self._migration.draining.on)
        self._telling = asyncio.get_running_loop().create_task(watched_by)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Announce where this replica publishes its load reports (Serve hands it to every router)."""
        return {"reports": self._reports.endpoint}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler's policy decides on (Serve asks for it every `metrics_interval_s`)."""
        return stats(self._page.read(), self._first_tokens, self._migration.draining.on)

    async def generate(
        self,
        frame: bytes,
        *,
        ticket: int,
        prompt_tokens: int,
        tier: int = 0,
        session: int | None = None,
        trace: dict[str, str] | None = None,
        target_replica: str | None = None,
    ) -> Outcome:
        """Generate one sequence; returns how it ended once its last delta is on its way.

        The keywords are for the router, which reads them off the call. Cancelling the call aborts the sequence.
        """
        outcome = await self._sequences.run(_submit_decoder.decode(frame))
        return self._looked_at(outcome)

    async def attach(self, rid: str, epoch: int, hop: int, *, target_replica: str | None = None) -> Outcome:
        """How a sequence that moved here ends, or where it went on to; cancelling the call aborts it."""
        return self._looked_at(await self._sequences.attach((rid, epoch, hop)))

    async def migration(self, frame: bytes, *parts: Any, target_replica: str | None = None) -> bytes:
        """Answer a message of a replica that gives a request to this one; `parts` are its KV, one array per rank."""
        return await self._migration.hear(frame, parts)

    async def give(self, frame: bytes, *, target_replica: str | None = None) -> bytes:
        """Give requests to another replica (`deployments.migration.messages.Give`); returns a `Given`."""
        return await self._migration.give(frame)

    async def drain(self, on: bool, *, target_replica: str | None = None) -> None:
        """Take no new requests and move those that are here away, or (`on` False) serve again."""
        if is_stopping():
            return
        if on:
            self._leave(None)
        elif self._migration.draining.on:
            self._migration.draining.stop()
            self._reports.set_state("serving")

    async def expect_help(self, grace_s: float, for_s: float, *, target_replica: str | None = None) -> None:
        """For `for_s` seconds lower tiers can be moved away: a higher one waits `grace_s` before they are requeued."""
        self._page.set_grace(grace_s, time.time() + for_s)

    def _leave(self, within_s: float | None) -> None:
        self._migration.draining.start(within_s)
        self._reports.set_state("draining")

    def _standing(self) -> Standing | None:
        """This replica as the pairing of its own drain sees it: only its requests and its size count."""
        figures = self._page.read()
        if figures is None:
            return None
        return Standing(
            replica=self._replica_id,
            left=0.0,
            free_blocks=figures.free_blocks,
            total_blocks=figures.total_blocks,
            max_num_seqs=figures.max_num_seqs,
            running_by_tier=figures.running_by_tier,
            waiting_by_tier=figures.waiting_by_tier,
            state="draining",
        )

    def _looked_at(self, outcome: Outcome) -> Outcome:
        if outcome.fault == "engine" and self._engine.errored:
            self._die("has a dead engine")
        return outcome

    def _ingress_lost(self, reply_to: str) -> None:
        """Abort the sequences of an ingress that is gone: Serve does not cancel the calls of a dead caller."""
        logger.warning("ingress %s is gone, aborting its %d sequences", reply_to, self._sequences.abort_of(reply_to))

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
        """Leave routing at once when this replica is stopped or its engine dies or stalls, busy or not."""
        stopping, ends_at = False, math.inf
        while not self._engine.errored:
            if not stopping and is_stopping():
                stopping = True
                self._leave(self._stop_s)
            now = time.monotonic()
            if self._termination.ordered:
                if ends_at == math.inf:
                    ends_at = now + TERMINATION_S - 2 * _TO_LEAVE_S
                    self._leave(TERMINATION_S - _HAND_BACK_S)
                if not self._sequences.running or now > ends_at:
                    return self._die("was sent SIGTERM")
            figures = self._page.read()
            if figures and self._stall.stalled(figures.steps, figures.running + figures.waiting > 0, now):
                for sequence in self._sequences.running:
                    self._sequences.hand_back(sequence, "stalled")
                return self._die("has a stalled engine")
            await asyncio.sleep(0.05)
        self._die("has a dead engine")

    def _die(self, why: str) -> None:
        """Tell every router, give pending answers a moment to leave, then end the process (Serve starts another)."""
        logger.error("replica %s %s: leaving routing and ending the process", self._replica_id, why)
        self._migration.draining.stop()
        self._reports.set_state("dead")
        self._page.close()
        loop = asyncio.get_running_loop()
        loop.call_later(_TO_LEAVE_S / 2, tracing.stop, 0.0)  # the spans of its last sequences are there then
        loop.call_later(_TO_LEAVE_S, os._exit, 1)

    async def __del__(self) -> None:
        if not hasattr(self, "_watch"):
            return  # stopped while it started: its engine ends with the process
        end = time.monotonic() + _LEAVE_S
        while self._sequences.running and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self._watch.cancel()
        self._telling.cancel()
        self._migration.close()
        self._reports.close()
        self._engine.shutdown()
        self._links.close()
        self._page.close()
        await asyncio.to_thread(tracing.stop, _LAST_SPANS_S)
