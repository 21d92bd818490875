"""What one routing decision costs: the policies on a fleet table, our Serve router, and Ray's built-in one."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvloop

from deployments.wire import ReplicaReport, ticket
from loadgen import lengths
from loadgen.metrics import percentile
from policies.balancing import BALANCING, BalancingPolicy, UsesTiers
from policies.fleet import FleetTable
from policies.tiers import Tiers, decaying_headroom
from policies.types import Call

IN_FLIGHT_PER_REPLICA = 8
RAY_DEFAULT = "Ray's power of two"
BLOCK_SIZE, BLOCKS, BATCH_TOKENS = 32, 512, 1024
TIERS = Tiers(headroom=decaying_headroom(4), aging_s=(30.0,) * 4)
Costs = dict[str, float]


def costs(nanoseconds: list[int]) -> Costs:
    """Median and 99th percentile, microseconds."""
    return {"p50_us": percentile(nanoseconds, 50) / 1e3, "p99_us": percentile(nanoseconds, 99) / 1e3}


def report(replica: str, seq: int, rng: random.Random, admitted: list[int]) -> ReplicaReport:
    """A load report with random figures, as of a busy replica."""
    free = rng.randrange(BLOCKS)
    running, waiting = ([rng.randrange(most) for _ in range(len(TIERS))] for most in (8, 2))
    return ReplicaReport(
        replica=replica,
        seq=seq,
        t=time.time(),
        state="serving",
        free_blocks=free,
        total_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        running=sum(running),
        waiting=sum(waiting),
        queued_tokens=rng.randrange(4 * BATCH_TOKENS),
        head_blocks=0,
        batch_tokens=BATCH_TOKENS,
        max_num_seqs=32,
        preemptions=0,
        admitted=admitted,
        running_by_tier=running,
        waiting_by_tier=waiting,
    )


def balancer(policy: str) -> BalancingPolicy:
    """A balancing policy that knows the tiers, if it uses any."""
    made = BALANCING.make(policy)
    if isinstance(made, UsesTiers):
        made.use_tiers(TIERS)
    return made


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from adding its pauses to single calls."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def table_costs(policy: str, replicas: int, calls: int, seed: int) -> dict[str, Costs]:
    """Each call timed alone, on a fleet that changes between them: choose, dispatch, complete, apply a report.

    Every request is dispatched, each report admits the latest tickets of its replica, and old requests complete, so
    that the ledger has a steady size; the clock's own cost (some 50 ns) is included.
    """
    rng, np_rng = random.Random(seed), np.random.default_rng(seed)
    table, chooser = FleetTable(), balancer(policy)
    names = [f"replica-{i}" for i in range(replicas)]
    recent: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        table.join(name)
        table.apply(report(name, 0, rng, []), 0.0)
    prompts = lengths.table("chat").sample(calls, np_rng)[0].tolist()
    tickets = [ticket(f"request-{i}", 0) for i in range(calls)]
    depth = IN_FLIGHT_PER_REPLICA * replicas
    spent: dict[str, list[int]] = {"choose": [], "dispatch": [], "complete": [], "apply": []}
    clock = time.perf_counter_ns
    with no_collection():
        for i in range(calls):
            now, tier = i * 0.001, i % len(TIERS)
            t0 = clock()
            column = chooser.choose(table, Call(prompts[i], tier, now), np_rng)
            t1 = clock()
            name = table.ids[column]
            t2 = clock()
            table.dispatch(tickets[i], name, prompts[i], tier=tier, now=now)
            t3 = clock()
            spent["choose"].append(t1 - t0)
            spent["dispatch"].append(t3 - t2)
            recent[name].append(tickets[i])
            if i >= depth:
                t0 = clock()
                table.complete(tickets[i - depth], now)
                spent["complete"].append(clock() - t0)
            reporter = names[i % replicas]
            news = report(reporter, i + 1, rng, recent[reporter][-IN_FLIGHT_PER_REPLICA:])
            t0 = clock()
            table.apply(news, now)
            spent["apply"].append(clock() - t0)
    return {name: costs(values) for name, values in spent.items() if values}


def warm_cost(policy: str, replicas: int, calls: int, seed: int) -> Costs:
    """`choose` alone, over and over on a table that does not change: all code and data stay in the CPU's caches."""
    rng, np_rng = random.Random(seed), np.random.default_rng(seed)
    table, chooser = FleetTable(), balancer(policy)
    for i in range(replicas):
        table.join(f"replica-{i}")
        table.apply(report(f"replica-{i}", 0, rng, []), 0.0)
    clock, spent = time.perf_counter_ns, []
    with no_collection():
        for i in range(calls):
            tier = i % len(TIERS)
            t0 = clock()
            chooser.choose(table, Call(500, tier), np_rng)
            spent.append(clock() - t0)
    return costs(spent)


def serve_cost(router: str, replicas: int, calls: int, seed: int) -> Costs:
    """One `_choose_replica_for_request`, as Serve awaits it for each call: ours with a policy, or Ray's default.

    No cluster and no network: replicas are stand-ins, and Ray's router finds every queue length in its cache, which
    is its best case. The loop is uvloop, as in Serve.
    """
    if router == RAY_DEFAULT:
        return uvloop.run(_timed(lambda: _ray_router(replicas, seed), calls))
    return uvloop.run(_timed(lambda: _fleet_router(router, replicas, seed), calls))


Choose = Callable[[Any], Awaitable[Any]]


async def _timed(make: Callable[[], tuple[Choose, Callable[[], None]]], calls: int) -> Costs:
    from ray.serve._private.common import RequestMetadata
    from ray.serve.request_router import PendingRequest

    choose, close = make()
    await asyncio.sleep(0.05)
    prompts = lengths.table("chat").sample(calls, np.random.default_rng(0))[0].tolist()
    spent = []
    with no_collection():
        for i, prompt in enumerate(prompts):
            pending = PendingRequest(
                args=[b""],
                kwargs={"ticket": ticket(str(i), 0), "prompt_tokens": prompt, "tier": i % len(TIERS)},
                metadata=RequestMetadata(request_id=str(i), internal_request_id=str(i), call_method="generate"),
            )
            t0 = time.perf_counter_ns()
            await choose(pending)
            spent.append(time.perf_counter_ns() - t0)
    close()
    return costs(spent)


def _infos(replicas: int) -> tuple[Any, list[Any]]:
    from ray.serve._private.common import DeploymentID, ReplicaID, RunningReplicaInfo

    deployment = DeploymentID("EngineReplica", "bench")
    return deployment, [
        RunningReplicaInfo(
            replica_id=ReplicaID(f"replica-{i}", deployment),
            node_id="node",
            node_ip="127.0.0.1",
            availability_zone=None,
            actor_name=f"replica-{i}",
            max_ongoing_requests=1_000_000,
        )
        for i in range(replicas)
    ]


def _stand_in() -> type:
    from ray.serve.request_router import RunningReplica

    class StandIn(RunningReplica):  # type: ignore[misc]  # Ray is read as Any
        """A replica without an actor behind it."""

        def __init__(self, info: Any) -> None:
            self._replica_info = info
            self._multiplexed_model_ids = set[str]()

        def push_proxy_handle(self, handle: Any) -> None:
            pass

        def update_replica_info(self, info: Any) -> None:
            self._replica_info = info

        async def get_queue_len(self, *, deadline_s: float) -> int:
            return 0

    return StandIn


def _router(cls: type, replicas: int, **state: Any) -> Any:
    from ray.serve._private.common import DeploymentHandleSource

    deployment, infos = _infos(replicas)
    router = cls(
        deployment_id=deployment,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        create_replica_wrapper_func=_stand_in(),
    )
    router.initialize_state(**state)
    router._update_running_replicas(infos)
    return router


def _fleet_router(policy: str, replicas: int, seed: int) -> tuple[Choose, Callable[[], None]]:
    from deployments.router import FleetRouter

    rng = random.Random(seed)
    tiers = {"headroom": TIERS.headroom, "aging_s": TIERS.aging_s}
    router = _router(FleetRouter, replicas, balancing={"policy": policy, "stale_s": 3600.0}, tiers=tiers)
    for name in list(router.table.ids):
        router._on_report(report(name, 0, rng, []))
    return router._choose_replica_for_request, router._subscriber.close


def _ray_router(replicas: int, seed: int) -> tuple[Choose, Callable[[], None]]:
    from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

    rng = random.Random(seed)
    router = _router(PowerOfTwoChoicesRequestRouter, replicas)
    for replica_id in router.curr_replicas:
        router.replica_queue_len_cache.update(replica_id, rng.randrange(20))
    return router._choose_replica_for_request, lambda: None
