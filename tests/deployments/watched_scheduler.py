"""Our scheduler with a look inside for tests on real engines."""

from __future__ import annotations

from typing import Any

from deployments.scheduler import PolicyScheduler


class WatchedScheduler(PolicyScheduler):
    """Remembers how many tokens each request's first step had, and answers the operation `look`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._first_steps: dict[str, int] = {}
        super().__init__(*args, **kwargs)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = super().schedule(throttle_prefills)
        for name, tokens in output.num_scheduled_tokens.items():
            self._first_steps.setdefault(name, tokens)
        return output

    def _kv_look(self) -> dict[str, Any]:
        return {
            "free": self.kv_cache_manager.block_pool.get_num_free_blocks(),
            "requests": len(self.requests),
            "first_steps": self._first_steps,
            "preemptions": self.preemptions,
        }

    def _kv_preempt_and_park(self, request: str, lease_s: float) -> Any:
        """Preempt a running request, as for want of blocks, and park it before it resumes in the next step."""
        found = self.requests[request]
        self.running.remove(found)
        self._preempt_request(found, 0.0)
        return self._kv_park(request, 0, 0, lease_s)
