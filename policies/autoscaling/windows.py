"""What time does to decisions: Serve's delays against swinging, and what is wanted at the end of one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.autoscaling.decision import Decision


@dataclass(slots=True)
class Windows:
    """A target follows what is wanted once it was wanted without a break for `up_s`, or `down_s`, seconds.

    These are Serve's `upscale_delay_s`, `downscale_delay_s` and `downscale_to_zero_delay_s` (None: as `down_s`), which
    Serve applies itself: a fleet of another kind (the simulator's) has the same rule here. So a reversal upwards comes
    at least `up_s` after the last step down, one downwards at least `down_s` after the last step up.
    """

    up_s: float
    down_s: float
    to_zero_s: float | None = None
    _way: int = 0
    _since: float = 0.0

    def apply(self, wanted: int, target: int, running: int, now: float) -> int:
        """The target from now on; `running`: replicas that run. From none it rises at once."""
        if running == 0 and wanted > 0:
            return wanted
        way = (wanted > target) - (wanted < target)
        if way != self._way:
            self._way, self._since = way, now
        if way == 0:
            return target
        to_zero = self.to_zero_s if self.to_zero_s is not None else self.down_s
        patience = self.up_s if way > 0 else to_zero if target == 1 else self.down_s
        if now - self._since + 1e-6 < patience:  # as Serve: differences of large times are a little off
            return target
        self._way = 0
        return wanted if target == 1 else max(wanted, 1)


@dataclass(slots=True)
class Trough:
    """What is wanted below the target is the most that was, since fewer than the target are wanted.

    A window that ends in a lull of a few seconds then says what the whole window needed. Source: HPA takes the highest
    recommendation of its stabilization window; here the window is Serve's delay, and its beginning is when Serve counts
    from (`Windows`).
    """

    _target: int = -1
    _most: int = 0

    def apply(self, decision: Decision, target: int) -> Decision:
        """The same decision, or one for fewer replicas raised to the most that a decision since then was for."""
        if target != self._target or decision.replicas >= target:
            self._target, self._most = target, 0
        if decision.replicas >= target:
            return decision
        self._most = max(self._most, decision.replicas)
        return replace(decision, replicas=self._most)
