"""What vLLM's serving classes ask of an engine and a fleet answers by itself: no engine here is up, down or asleep."""

from __future__ import annotations

from typing import Any

from app.errors import NoReplicaAvailable
from app.vllm_compat import EngineClient


class RemoteEngine(EngineClient):
    """The parts of the interface that have nothing to do with generating; `close` is the subclass's."""

    is_running = property(lambda self: True)
    is_stopped = property(lambda self: False)
    errored = property(lambda self: False)
    dead_error = property(lambda self: NoReplicaAvailable("the fleet is down", retry_after=5))

    def close(self) -> None:
        """Let go of everything."""
        raise NotImplementedError

    def shutdown(self, timeout: float | None = None) -> None:
        """Same as `close`."""
        self.close()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Text generation only."""
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        """No spans are made here; trace headers travel with each submission all the same."""
        return False

    async def do_log_stats(self) -> None:
        """Engines log their own statistics."""

    async def check_health(self) -> None:
        """The gate answers health; a fleet client is never sick by itself."""

    async def reset_mm_cache(self) -> None:
        """Nothing is cached here."""

    async def is_sleeping(self) -> bool:
        """Replicas do not sleep."""
        return False

    async def is_paused(self) -> bool:
        """Replicas are not paused."""
        return False

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Pooling models are not served."""
        raise NotImplementedError("pooling models are not served by this fleet")

    async def _not_here(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this belongs to one engine; a fleet's ingress cannot do it")

    notify_kv_transfer_request_rejected = start_profile = stop_profile = reset_encoder_cache = _not_here
    reset_prefix_cache = sleep = release_kv_cache_memory = wake_up = add_lora = _not_here
    pause_generation = resume_generation = _not_here
