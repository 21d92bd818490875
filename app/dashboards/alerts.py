"""Prometheus alert rules: broken promises per tier, drains that hang, silent replicas, no coordinator.

The burn rates and windows are those of the Site Reliability Workbook (Google, 2018), chapter 5, "multiwindow,
multi-burn-rate alerts": a burn rate of 1 uses the error budget up exactly at the end of its 30 days.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from app.dashboards.queries import CRASHES

OBJECTIVE = 0.99  # of the sequences keep what their tier promises
JUDGED = "ray_tidegate_slo_sequences_total"


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule: it fires when `expr` has had a value for `hold`. `signals` are what it compares, always there.

    A signal that needs traffic is NaN without.
    """

    name: str
    signals: tuple[str, ...]
    expr: str
    hold: str
    severity: Literal["page", "ticket"]
    summary: str
    description: str

    def rule(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.description},
        }


def burn(window: str, objective: float = OBJECTIVE) -> str:
    """How fast a tier uses up its error budget, by the sequences of the last `window`."""
    missed = f'sum by (tier) (rate({JUDGED}{{result!="met"}}[{window}]))'
    return f"{missed} / sum by (tier) (rate({JUDGED}[{window}])) / {1 - objective:g}"


def alerts(objective: float = OBJECTIVE) -> list[Alert]:
    """All rules, for this share of sequences that are to keep their tier's promises."""
    return [
        *(
            _burning(*row, objective)
            for row in (("Fast", "1h", "5m", 14.4, "page"), ("Slow", "6h", "30m", 6.0, "ticket"))
        ),
        _above(
            "TidegateDrainStuck",
            "max by (replica) (ray_tidegate_draining_seconds)",
            900,
            "1m",
            "ticket",
            "Replica {{ $labels.replica }} does not get empty",
            "It has been draining for {{ $value | humanizeDuration }}. `python -m app.drain` says what is left; "
            "docs/migration.md what cannot move.",
        ),
        _above(
            "TidegateReportsStale",
            "max by (replica) (ray_tidegate_report_age_seconds)",
            5,
            "30s",
            "page",
            "Replica {{ $labels.replica }} tells no load",
            "The coordinator has heard nothing for {{ $value | humanizeDuration }}: requests are routed there by "
            "guess. Look at its log and at the CPU of its node.",
        ),
        Alert(
            "TidegateCoordinatorDown",
            ("max(ray_tidegate_coordinator_up)", "count(ray_tidegate_kv_capacity_tokens)"),
            "absent(ray_tidegate_coordinator_up) and on () (count(ray_tidegate_kv_capacity_tokens) > 0)",
            "2m",
            "ticket",
            "No coordinator looks at the fleet",
            "Requests go on, but none moves by policy. Serve restarts the deployment Coordinator; if it does not, "
            "`serve status` says why.",
        ),
        _above(
            "TidegateRoutingBlind",
            'sum(rate(ray_tidegate_router_decisions_total{reports="stale"}[5m])) '
            "/ sum(rate(ray_tidegate_router_decisions_total[5m]))",
            0.1,
            "5m",
            "ticket",
            "Requests are routed without fresh load reports",
            "{{ $value | humanizePercentage }} of the decisions fell back to two choices by own calls.",
        ),
        _above(
            "TidegateReplicasCrash",
            CRASHES.replace("[1m]", "[15m]"),
            3,
            "0s",
            "page",
            "Replicas crash or stall",
            "{{ $value | humanize }} sequences had to be sent again in 15 minutes. The actors' logs say why.",
        ),
    ]


def _burning(
    kind: str, window: str, short: str, rate: float, severity: Literal["page", "ticket"], objective: float
) -> Alert:
    long_burn, short_burn = burn(window, objective), burn(short, objective)
    return Alert(
        f"TidegateSLOBurn{kind}",
        (long_burn, short_burn),
        f"({long_burn} > {rate:g}) and ({short_burn} > {rate:g})",
        "2m",
        severity,
        f"Tier {{{{ $labels.tier }}}} breaks its promises {rate:g} times as often as it may",
        f"Over {window} and {short}. The dashboard `Tidegate: tiers and promises` says which promise, and where the "
        "time goes.",
    )


def _above(
    name: str, signal: str, limit: float, hold: str, severity: Literal["page", "ticket"], summary: str, description: str
) -> Alert:
    return Alert(name, (signal,), f"{signal} > {limit:g}", hold, severity, summary, description)


def rules(objective: float = OBJECTIVE) -> dict[str, Any]:
    """The rule file."""
    return {"groups": [{"name": "tidegate", "rules": [alert.rule() for alert in alerts(objective)]}]}
