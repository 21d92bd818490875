"""Every metric of ours: name, type, unit, labels and meaning, and the functions that count what rarely happens.

docs/metrics.md is this module as a page; the dashboards and alert rules in app/dashboards name nothing else of ours.
Rules: one prefix, base units (seconds, bytes, tokens), label values that are few and known (metric_series.py), a
`replica` label on gauges only. What happens per request is recorded through series that were looked up before
(app/metrics.py), what happens per token is a plain addition there.
"""

from __future__ import annotations

from deployments.metric_series import Kind, Metric

PREFIX = "tidegate_"
METRICS: list[Metric] = []

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0)
_STEPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_LONG = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_PAUSES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

SHED_REASONS = ("queue_full", "tier_queue_full", "shed", "no_replica", "rate_limit_requests", "rate_limit_tokens")
OUTCOMES = ("finished", "aborted", "shed", "timeout", "failed")
FAILOVER_REASONS = ("actor_died", "engine_dead", "draining", "stalled", "tokens_lost", "no_replica", "other")
MOVE_REASONS = ("drain", "tier", "defragment", "balance", "hand")

_AGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)

_TIER = {"tier": "its name in the config"}
_REPLICA = {"replica": "its id"}
_MOVE = {
    "reason": "`drain`, `tier`, `defragment`, `balance`, `hand`; `lease`: the destination gave up on a silent source",
    "outcome": "`done`, `cancelled`, `aborted`, `rolled_back`, `expired`, `recompute`",
    "why": "what led there",
}


def _define(
    name: str,
    kind: Kind,
    unit: str,
    where: str,
    help: str,
    labels: dict[str, str] | None = None,
    buckets: tuple[float, ...] = (),
) -> Metric:
    metric = Metric(PREFIX + name, kind, unit, where, help, labels or {}, buckets)
    METRICS.append(metric)
    return metric


# What clients see, recorded by the ingresses. A sequence is one answer; a request with n=2 has two.

HTTP_RESPONSES = _define(
    *("http_responses_total", "counter", "responses", "ingress"),
    "HTTP answers by the status that the client got; `closed`: it left before there was one",
    {"route": "path of the API, `other` for any other", "status": "HTTP status"},
)
SEQUENCES = _define(
    *("sequences_total", "counter", "sequences", "ingress"),
    "Sequences that ended",
    {
        **_TIER,
        "model": "the served model or adapter",
        "outcome": "`finished`, `aborted` (the client left), `shed`, `timeout`, `failed`",
    },
)
SHEDS = _define(
    *("sheds_total", "counter", "requests", "ingress"),
    "Requests turned away (429, 503)",
    {
        **_TIER,
        "reason": "`queue_full`, `tier_queue_full`, `shed` (made room for a higher tier), `no_replica`, "
        "`rate_limit_requests`, `rate_limit_tokens`",
    },
)
TTFT = _define(
    *("time_to_first_token_seconds", "histogram", "seconds", "ingress"),
    "TTFT: from the request's arrival at the ingress to its first token there",
    _TIER,
    _SECONDS,
)
FIRST_TOKEN_QUEUE = _define(
    *("queue_wait_seconds", "histogram", "seconds", "ingress"),
    "Part of the TTFT: in the engine's queue, until its first step",
    _TIER,
    _SECONDS,
)
FIRST_TOKEN_ENGINE = _define(
    *("first_token_engine_seconds", "histogram", "seconds", "ingress"),
    "Part of the TTFT: in the engine, queue and prefill",
    _TIER,
    _SECONDS,
)
FIRST_TOKEN_FRAMEWORK = _define(
    *("first_token_framework_seconds", "histogram", "seconds", "ingress"),
    "Part of the TTFT: everything but the engine: parsing, tokenising, admission, routing, Ray, the way back",
    _TIER,
    _SECONDS,
)
TPOT = _define(
    *("time_per_output_token_seconds", "histogram", "seconds", "ingress"),
    "TPOT of a finished sequence: from its first to its last token, per token after the first",
    _TIER,
    _STEPS,
)
TGT = _define(
    *("token_generation_time_seconds", "histogram", "seconds", "ingress"),
    "TGT of a finished sequence: from its first to its last token",
    _TIER,
    _LONG,
)
SLO = _define(
    *("slo_sequences_total", "counter", "sequences", "ingress"),
    "Sequences judged by what their tier promises: those that finished, failed or ran out of time. Sheds and clients "
    "that left are not judged, a tier that promises nothing is always met",
    {**_TIER, "result": "`met`, `ttft`, `tpot` (the first that was missed), `failed`"},
)
PROMPT_TOKENS = _define(
    *("prompt_tokens_total", "counter", "tokens", "ingress"), "Prompt tokens of sequences with a first token", _TIER
)
OUTPUT_TOKENS = _define(
    *("output_tokens_total", "counter", "tokens", "ingress"), "Tokens generated, as they come", _TIER
)
GOOD_TOKENS = _define(
    *("good_output_tokens_total", "counter", "tokens", "ingress"),
    "Tokens of sequences that kept what their tier promises, counted at their end: goodput",
    _TIER,
)
TENANT_SEQUENCES = _define(
    *("tenant_sequences_total", "counter", "sequences", "ingress"),
    "Sequences that ended, by the tenant of the API key",
    {"tenant": "of the list of keys; `none`: without a key"},
)
TENANT_TOKENS = _define(
    *("tenant_tokens_total", "counter", "tokens", "ingress"),
    "Tokens of sequences that ended",
    {"tenant": "of the list of keys; `none`: without a key", "kind": "`prompt`, `output`"},
)
QUEUED = _define(
    *("queued_sequences", "gauge", "sequences", "ingress"),
    "Sequences that wait for their first token, of one ingress process",
    _TIER,
)
FAILOVERS = _define(
    *("failovers_total", "counter", "sequences", "ingress"),
    "Sequences sent again because their replica could not go on",
    {"reason": "`actor_died`, `engine_dead`, `draining`, `stalled`, `tokens_lost`, `no_replica`, `other`"},
)
PAUSES = _define(
    *("migration_pause_seconds", "histogram", "seconds", "ingress"),
    "Gap in a client's stream over a move",
    {},
    _PAUSES,
)

# The router, where calls are made: in each ingress, and in the coordinator for moves.

DECISIONS = _define(
    *("router_decisions_total", "counter", "decisions", "router"),
    "Choices of a replica",
    {"policy": "the balancing policy", "reports": "`fresh`; `stale`: all too old, two choices by own calls instead"},
)
DISAGREEMENTS = _define(
    *("router_disagreements_total", "counter", "decisions", "router"),
    "Choices that join-the-shortest-queue (two choices, with all replicas to choose from) would not have made: the "
    "chosen replica had more requests, own calls included, than another one",
    {"policy": "the balancing policy"},
)
REPORT_AGE_AT_USE = _define(
    *("router_report_age_seconds", "histogram", "seconds", "router"),
    "Age of the chosen replica's last report when it was chosen",
    {},
    _AGES,
)

# Moves, on the replica that gives.

MIGRATIONS = _define("migrations_total", "counter", "moves", "replica", "Moves of a request that ended", _MOVE)
MIGRATION_BYTES = _define(
    *("migration_bytes_total", "counter", "bytes", "replica"), "KV copied by moves", {"reason": _MOVE["reason"]}
)
MIGRATION_BLOCKS = _define(
    *("migration_blocks_total", "counter", "KV blocks", "replica"), "KV copied by moves", {"reason": _MOVE["reason"]}
)
MIGRATION_STAGES = _define(
    *("migration_stages_total", "counter", "stages", "replica"), "Stages copied while the request decoded"
)
PARKS = _define(
    *("migration_park_seconds", "histogram", "seconds", "replica"),
    "From park to the destination's first token, on the source",
    {},
    _PAUSES,
)

# One replica, by itself: gone within seconds of its process.

RUNNING = _define("running_requests", "gauge", "requests", "replica", "Requests in the batch", {**_REPLICA, **_TIER})
WAITING = _define("waiting_requests", "gauge", "requests", "replica", "Requests queued", {**_REPLICA, **_TIER})
PREFILL = _define(
    *("queued_prefill_tokens", "gauge", "tokens", "replica"), "Prompt tokens that are not computed yet", _REPLICA
)
CAPACITY = _define("kv_capacity_tokens", "gauge", "tokens", "replica", "Size of the KV cache", _REPLICA)
FREE = _define("kv_free_tokens", "gauge", "tokens", "replica", "Free part of the KV cache", _REPLICA)
USED = _define(
    *("kv_used_tokens", "gauge", "tokens", "replica"),
    "KV cache of the running requests, shared blocks counted for each",
    {**_REPLICA, **_TIER},
)
HEADROOM = _define(
    *("kv_headroom_tokens", "gauge", "tokens", "replica"), "Kept free for the tiers that are present", _REPLICA
)
FREENESS = _define(
    *("freeness_tokens", "gauge", "tokens", "replica"),
    "F: KV cache left per running request, headroom taken off, which is the steps until it is full. Idle: as for one "
    "request; draining: 0",
    _REPLICA,
)
FREENESS_NORMAL = _define(
    *("freeness_normal_tokens", "gauge", "tokens", "replica"), "F_normal: the same without headroom", _REPLICA
)
PHI = _define(
    *("phi_ratio", "gauge", "1", "replica"),
    "phi: freeness against an even share of the cache in a full batch; moves follow its differences",
    _REPLICA,
)
DRAINING = _define(
    *("draining_seconds", "gauge", "seconds", "replica"), "For how long the replica has been draining; else 0", _REPLICA
)
PREEMPTIONS = _define(
    *("preemptions_total", "counter", "requests", "replica"), "Runners sent back to the queue, their KV lost"
)

# The fleet, as the coordinator sees it.

COORDINATOR_UP = _define("coordinator_up", "gauge", "1", "coordinator", "1 while the coordinator looks at the fleet")
REPORT_AGE = _define(
    *("report_age_seconds", "gauge", "seconds", "coordinator"), "Age of the last load report of a replica", _REPLICA
)
REPLICAS = _define(
    *("replicas", "gauge", "replicas", "coordinator"),
    "Replicas that report",
    {"state": "`serving`, `draining`, `dead`"},
)
MOVING = _define("moves_under_way", "gauge", "moves", "coordinator", "Moves that the coordinator waits for")

# The autoscaler, in Serve's controller; only where `autoscaling_config` names the freeness policy.

SCALING = _define(
    *("autoscaling_decisions_total", "counter", "decisions", "controller"),
    "Changed decisions of the autoscaler, before Serve's windows",
    {"direction": "`up`, `down`, `hold`", "reason": "see [autoscaling](autoscaling.md)"},
)
WANTED = _define("autoscaling_wanted_replicas", "gauge", "replicas", "controller", "What the policy wants")
TARGET = _define(
    "autoscaling_target_replicas", "gauge", "replicas", "controller", "What Serve aims at, windows applied"
)
ACTUAL = _define("autoscaling_running_replicas", "gauge", "replicas", "controller", "What runs")
FLEET_FREENESS = _define(
    *("autoscaling_freeness_tokens", "gauge", "tokens", "controller"),
    "F of the fleet, by which the policy decides; not set while nothing runs or waits",
)
FLEET_UTILIZATION = _define(
    *("autoscaling_utilization_ratio", "gauge", "1", "controller"),
    "U of the fleet: prompt tokens to compute over those that it can; 0 until a replica knows what it can",
)


def moved(
    reason: str,
    outcome: str,
    why: str,
    *,
    stages: int = 0,
    blocks: int = 0,
    bytes: int = 0,
    park_s: float | None = None,
) -> None:
    """Count a move that ended, on its source: `outcome` is the hand-shake's last state, `why` what led there.

    `stages`, `blocks` and `bytes` were written on the destination; `park_s`: seconds from Park to Committed, None if
    it never came to that.
    """
    MIGRATIONS.at(reason, outcome, why).inc()
    if bytes:
        MIGRATION_BYTES.at(reason).inc(bytes)
    if blocks:
        MIGRATION_BLOCKS.at(reason).inc(blocks)
    if stages:
        MIGRATION_STAGES.at().inc(stages)
    if park_s is not None:
        PARKS.at().observe(park_s)


def paused(seconds: float) -> None:
    """Count, at the ingress, the gap that a client's stream had over a move."""
    PAUSES.at().observe(seconds)


def failed_over(reason: str) -> None:
    """Count a sequence that is sent again because its replica cannot go on (app/calls.py has the reasons)."""
    FAILOVERS.at(reason).inc()


def scaling_wanted(direction: str, reason: str) -> None:
    """Count a new decision of the autoscaler: `up`, `down` or `hold`, before Serve's windows."""
    SCALING.at(direction, reason).inc()
