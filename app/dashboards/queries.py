"""What boards ask with: rates, quantiles, gauges of replicas; the annotations of all boards; series not our own."""

from __future__ import annotations

from app.dashboards.model import Mark, Panel, Query, Unit

#: Series that are not ours: vLLM's, as its own logger gives them to Ray.
FOREIGN = frozenset(
    {
        "ray_vllm_generation_tokens_total",
        "ray_vllm_inter_token_latency_seconds_bucket",
        "ray_vllm_kv_cache_usage_perc",
        "ray_vllm_num_requests_running",
        "ray_vllm_num_requests_waiting",
        "ray_vllm_prefix_cache_hits_total",
        "ray_vllm_prefix_cache_queries_total",
        "ray_vllm_prompt_tokens_total",
        "ray_vllm_request_queue_time_seconds_bucket",
    }
)

TIER = '{tier=~"$tier"}'
RANGE = "[$__rate_interval]"

MOVES = 'sum(rate(ray_tidegate_migrations_total{outcome="done"}[1m]))'
CRASHES = 'sum(increase(ray_tidegate_failovers_total{reason=~"actor_died|engine_dead|stalled"}[1m]))'
MARKS = (
    Mark("migration burst", "blue", MOVES, "> 0.5"),
    Mark("scale event", "green", 'changes(sum(ray_tidegate_replicas{state="serving"})[1m:5s])', "> 0"),
    Mark("failure", "red", CRASHES, "> 0"),
)


def quantile(q: float, histogram: str, by: str = "tier", matching: str = TIER) -> Query:
    """A quantile of a histogram over the interval of a plot."""
    within = f"sum by (le, {by}) (rate({histogram}_bucket{matching}{RANGE}))" if by else ""
    within = within or f"sum by (le) (rate({histogram}_bucket{matching}{RANGE}))"
    return Query(f"histogram_quantile({q}, {within})", f"{{{{{by}}}}} p{100 * q:g}" if by else f"p{100 * q:g}")


def rate(counter: str, by: str, matching: str = "") -> Query:
    """Events per second, by a label."""
    return Query(
        f"sum by ({by}) (rate({counter}{matching}{RANGE}))", " ".join(f"{{{{{x.strip()}}}}}" for x in by.split(","))
    )


def replica(gauge: str, legend: str = "{{replica}}") -> Query:
    """A gauge of each replica."""
    return Query(f"max by (replica) ({gauge})", legend)


def latency(title: str, histogram: str, help: str) -> Panel:
    """Median and tail of each tier."""
    return Panel(title, "s", help, (quantile(0.5, histogram), quantile(0.95, histogram)))


def number(title: str, unit: Unit, help: str, expr: str) -> Panel:
    """One number."""
    return Panel(title, unit, help, (Query(expr),), single=True, width=4)
