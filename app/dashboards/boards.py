"""What people who run the service look at: traffic, promises, autoscaling. `BOARDS` are all dashboards."""

from __future__ import annotations

from app.dashboards.engine_boards import MIGRATION, REPLICAS
from app.dashboards.model import Board, Panel, Query
from app.dashboards.queries import MARKS, RANGE, TIER, latency, number, quantile, rate

OVERVIEW = Board(
    "tidegate-overview",
    "Tidegate: overview",
    "The fleet at a glance: who is there, what is asked, how long it takes.",
    (
        (
            "Now",
            (
                number(
                    "Replicas that serve", "short", "By the coordinator.", 'sum(ray_tidegate_replicas{state="serving"})'
                ),
                number("Running", "short", "Requests in the batches.", "sum(ray_tidegate_running_requests)"),
                number("Waiting", "short", "Requests in the engines' queues.", "sum(ray_tidegate_waiting_requests)"),
                number(
                    *("Tokens/s", "short", "Generated, by the ingresses."),
                    f"sum(rate(ray_tidegate_output_tokens_total{RANGE}))",
                ),
                number(
                    *("Within promises", "percentunit", "Of the sequences that ended."),
                    f'sum(rate(ray_tidegate_slo_sequences_total{{result="met"}}{RANGE})) '
                    f"/ sum(rate(ray_tidegate_slo_sequences_total{RANGE}))",
                ),
                number(
                    *("KV cache used", "percentunit", "Of the whole fleet."),
                    "1 - sum(ray_tidegate_kv_free_tokens) / sum(ray_tidegate_kv_capacity_tokens)",
                ),
            ),
        ),
        (
            "Traffic",
            (
                Panel(
                    *("Answers by status", "reqps", "What clients got; `closed`: they left first."),
                    (rate("ray_tidegate_http_responses_total", "status"),),
                ),
                Panel(
                    *("Tokens per second", "short", "Of the ingresses."),
                    (
                        Query(f"sum(rate(ray_tidegate_prompt_tokens_total{RANGE}))", "prompt"),
                        Query(f"sum(rate(ray_tidegate_output_tokens_total{RANGE}))", "output"),
                        Query(f"sum(rate(ray_tidegate_good_output_tokens_total{RANGE}))", "output within promises"),
                    ),
                ),
                Panel(
                    *("Requests turned away", "reqps", "429 and 503, by reason."),
                    (rate("ray_tidegate_sheds_total", "reason"),),
                ),
                Panel(
                    *("Time to first token", "s", "p95 of all tiers, and its parts (their p95 do not add up)."),
                    (
                        quantile(0.95, "ray_tidegate_time_to_first_token_seconds", "", ""),
                        Query(quantile(0.95, "ray_tidegate_first_token_engine_seconds", "", "").expr, "engine p95"),
                        Query(
                            quantile(0.95, "ray_tidegate_first_token_framework_seconds", "", "").expr, "framework p95"
                        ),
                    ),
                ),
                Panel(
                    *("Sent again", "reqps", "Sequences whose replica could not go on."),
                    (rate("ray_tidegate_failovers_total", "reason"),),
                ),
            ),
        ),
        (
            "Tenants",
            (
                Panel(
                    *("Sequences", "reqps", "By the tenant of the key."),
                    (rate("ray_tidegate_tenant_sequences_total", "tenant"),),
                    width=12,
                ),
                Panel(
                    *("Tokens per second", "short", "Prompt and output, counted at the end of a sequence."),
                    (rate("ray_tidegate_tenant_tokens_total", "tenant, kind"),),
                    width=12,
                ),
            ),
        ),
        (
            "Routing",
            (
                Panel(
                    *("Decisions", "reqps", "`stale`: by own calls alone, as every report was too old."),
                    (rate("ray_tidegate_router_decisions_total", "policy, reports"),),
                ),
                Panel(
                    "Disagreement",
                    "percentunit",
                    "Decisions for a replica that had more requests than another one.",
                    (
                        Query(
                            f"sum(rate(ray_tidegate_router_disagreements_total{RANGE})) "
                            f"/ sum(rate(ray_tidegate_router_decisions_total{RANGE}))",
                            "of all",
                        ),
                    ),
                ),
                Panel(
                    *("Age of reports", "s", "When used by a router, and now by the coordinator (worst replica)."),
                    (
                        Query(quantile(0.95, "ray_tidegate_router_report_age_seconds", "", "").expr, "at use p95"),
                        Query("max(ray_tidegate_report_age_seconds)", "worst now"),
                    ),
                ),
            ),
        ),
    ),
    MARKS,
)

TIERS = Board(
    "tidegate-tiers",
    "Tidegate: tiers and promises",
    "What each tier promises, and what its clients see.",
    (
        (
            "Promises",
            (
                Panel(
                    *("Kept", "percentunit", "Share of judged sequences that kept what their tier promises."),
                    (
                        Query(
                            'sum by (tier) (rate(ray_tidegate_slo_sequences_total{tier=~"$tier", result="met"}'
                            f"{RANGE})) "
                            f"/ sum by (tier) (rate(ray_tidegate_slo_sequences_total{TIER}{RANGE}))",
                            "{{tier}}",
                        ),
                    ),
                ),
                Panel(
                    *("Missed", "reqps", "What was missed first."),
                    (rate("ray_tidegate_slo_sequences_total", "tier, result", '{tier=~"$tier", result!="met"}'),),
                ),
                Panel(
                    *("Goodput", "short", "Tokens per second of sequences within their promises."),
                    (rate("ray_tidegate_good_output_tokens_total", "tier", TIER),),
                ),
            ),
        ),
        (
            "Latency",
            (
                latency(
                    "TTFT", "ray_tidegate_time_to_first_token_seconds", "Arrival at the ingress to first token there."
                ),
                latency("TPOT", "ray_tidegate_time_per_output_token_seconds", "Per token after the first."),
                latency("TGT", "ray_tidegate_token_generation_time_seconds", "First to last token."),
                latency("Queue wait", "ray_tidegate_queue_wait_seconds", "Part of the TTFT: in the engine's queue."),
                latency("Engine", "ray_tidegate_first_token_engine_seconds", "Part of the TTFT: queue and prefill."),
                latency("Framework", "ray_tidegate_first_token_framework_seconds", "Part of the TTFT: all the rest."),
            ),
        ),
        (
            "Admission",
            (
                Panel(
                    *("Turned away", "reqps", "By tier and reason."),
                    (rate("ray_tidegate_sheds_total", "tier, reason", TIER),),
                ),
                Panel(
                    *("Waiting for a first token", "short", "At the ingresses."),
                    (Query(f"sum by (tier) (ray_tidegate_queued_sequences{TIER})", "{{tier}}"),),
                ),
                Panel(
                    *("Ends", "reqps", "How sequences ended."),
                    (rate("ray_tidegate_sequences_total", "tier, outcome", TIER),),
                ),
            ),
        ),
    ),
    MARKS,
)

AUTOSCALING = Board(
    "tidegate-autoscaling",
    "Tidegate: autoscaling",
    "What the autoscaler decides, why, and from what. Empty for a fleet of a fixed size.",
    (
        (
            "Replicas",
            (
                Panel(
                    "Wanted, target, running",
                    "short",
                    "Wanted by the policy; what Serve aims at after its windows; what runs.",
                    (
                        Query("max(ray_tidegate_autoscaling_wanted_replicas)", "wanted"),
                        Query("max(ray_tidegate_autoscaling_target_replicas)", "target"),
                        Query("max(ray_tidegate_autoscaling_running_replicas)", "running"),
                    ),
                    width=12,
                ),
                Panel(
                    *("By state", "short", "As the coordinator hears them."),
                    (Query("sum by (state) (ray_tidegate_replicas)", "{{state}}"),),
                    width=12,
                ),
            ),
        ),
        (
            "Decisions",
            (
                Panel(
                    *("Changed decisions", "short", "In the interval, by direction and reason."),
                    (
                        Query(
                            f"sum by (direction, reason) (increase(ray_tidegate_autoscaling_decisions_total{RANGE}))",
                            "{{direction}} {{reason}}",
                        ),
                    ),
                    width=12,
                ),
                Panel(
                    *("Freeness of the fleet", "short", "F by which the policy decides; not there while nothing runs."),
                    (Query("max(ray_tidegate_autoscaling_freeness_tokens)", "F"),),
                    width=12,
                ),
                Panel(
                    *(
                        "Utilization of the fleet",
                        "percentunit",
                        "U by which it decides; 0 until a replica knows its rate.",
                    ),
                    (Query("max(ray_tidegate_autoscaling_utilization_ratio)", "U"),),
                    width=12,
                ),
                Panel(
                    *("What presses", "s", "p95 of queue wait and TTFT, all tiers."),
                    (
                        Query(quantile(0.95, "ray_tidegate_queue_wait_seconds", "", "").expr, "queue wait p95"),
                        Query(quantile(0.95, "ray_tidegate_time_to_first_token_seconds", "", "").expr, "TTFT p95"),
                    ),
                    width=12,
                ),
            ),
        ),
    ),
    MARKS,
)

BOARDS = (OVERVIEW, TIERS, REPLICAS, MIGRATION, AUTOSCALING)
