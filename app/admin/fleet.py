"""The fleet as the admin server sees it: asks coordinator and Serve, remembers what they said, passes orders on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from pydantic import ValidationError
from ray.exceptions import RayTaskError

from app.admin.status import About, Source, Status, make_status
from app.config.errors import Problem, problems_of
from app.config.schema import UserConfig
from deployments.serve_config import Deployed, NotDeclaredError

FRESH_S = 0.3  # so old may be what is shown
SERVE_FRESH_S = 3.0
PATIENCE_S = 5.0  # for an answer


class RefusedError(ValueError):
    """An order that was not carried out; `field` names the part of it at fault, if one is."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class AwayError(RuntimeError):
    """Who should carry the order out does not answer: try again in a few seconds."""


class Asked(Protocol):
    """The coordinator: deployments.coordinator.Coordinator by its Serve handle, or its double in tests."""

    async def state(self) -> dict[str, Any]: ...
    async def drain(self, replica: str) -> None: ...
    async def undrain(self, replica: str) -> None: ...
    async def pause(self, on: bool) -> None: ...
    async def note(self, kind: str, text: str) -> None: ...


class ServeApp(Protocol):
    """This application in Serve; both methods block, so they run in a thread."""

    @property
    def name(self) -> str: ...

    def look(self) -> Deployed: ...
    def change(self, user_config: dict[str, Any]) -> None: ...


class Known:
    """One source of facts: its last answer, when that came, and why there is none since."""

    def __init__(self, ask: Callable[[], Awaitable[Any]], fresh_s: float) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._lock = asyncio.Lock()
        self._looked = -float("inf")  # monotonic seconds
        self.answer: Any = None
        self.since: float | None = None
        self.problem: str | None = None

    async def look(self) -> Source:
        """Ask again if the last answer is not fresh; many who ask at once are one question."""
        async with self._lock:
            if time.monotonic() - self._looked >= self._fresh_s:
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        self.answer = await self._ask()
                    self.since, self.problem = time.time(), None
                except TimeoutError:
                    self.problem = f"no answer within {PATIENCE_S:.0f} s"
                except Exception as error:  # whatever a dying actor raises: the page lives on without it
                    self.problem = " ".join(str(error).split())[:300] or type(error).__name__
                self._looked = time.monotonic()
        return Source(answers=self.problem is None, since=self.since, problem=self.problem)

    def expire(self) -> None:
        """Make the next look ask."""
        self._looked = -float("inf")


class FleetView:
    """Status and orders; one object for page, JSON and handle."""

    def __init__(self, about: About, coordinator: Asked, app: ServeApp, node: str, actions: bool) -> None:
        self.about = about
        self._coordinator = coordinator
        self._app = app
        self._node = node
        self._actions = actions
        self._state = Known(coordinator.state, FRESH_S)
        self._serve = Known(lambda: asyncio.to_thread(app.look), SERVE_FRESH_S)

    async def status(self) -> Status:
        """The fleet now; where a source does not answer, what it said last, with its age."""
        coordinator, serve = await asyncio.gather(self._state.look(), self._serve.look())
        return make_status(
            self.about,
            self._state.answer,
            self._serve.answer,
            application=self._app.name,
            t=time.time(),
            node=self._node,
            actions=self._actions,
            coordinator=coordinator,
            serve=serve,
        )

    async def drain(self, replica: str) -> None:
        """Let a replica give its requests away and take no more."""
        await self._order(self._coordinator.drain(replica))

    async def undrain(self, replica: str) -> None:
        """Let it take requests again."""
        await self._order(self._coordinator.undrain(replica))

    async def pause(self, on: bool) -> None:
        """Make no moves by policy, or make them again."""
        await self._order(self._coordinator.pause(on))

    async def change(self, settings: dict[str, Any]) -> None:
        """Put `scheduling` and `balancing` of `settings` in force, as `serve deploy` of an edited user_config would."""
        try:
            checked = UserConfig.model_validate(settings)
        except ValidationError as error:
            problem: Problem = problems_of(error, UserConfig, settings)[0]
            raise RefusedError(str(problem), problem.path) from error
        change = {name: settings[name] for name in checked.model_fields_set if settings[name] is not None}
        if not change:
            raise RefusedError("nothing to change: give `scheduling`, `balancing` or both")
        try:
            await asyncio.to_thread(self._app.change, change)
        except NotDeclaredError as error:
            raise RefusedError(str(error)) from error
        except Exception as error:
            raise AwayError(f"Serve did not take the settings: {error}") from error
        self._serve.expire()
        said = "; ".join(f"{name} {_words(section)}" for name, section in change.items())
        try:
            await self._order(self._coordinator.note("settings", f"settings changed: {said}"))
        except AwayError:
            pass  # the settings are in force; only the list of events lacks them

    async def _order(self, call: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await call
        except RayTaskError as error:
            if isinstance(error.cause, ValueError):
                raise RefusedError(str(error.cause)) from error
            raise AwayError(f"the coordinator could not do it: {error.cause}") from error
        except ValueError as error:
            raise RefusedError(str(error)) from error
        except Exception as error:
            why = str(error) or f"no answer within {PATIENCE_S:.0f} s"
            raise AwayError(f"the coordinator does not answer, try again in a few seconds: {why}") from error
        self._state.expire()


def _words(section: dict[str, Any]) -> str:
    policy, *more = section.get("policy", ""), *(f"{key}={value}" for key, value in section.items() if key != "policy")
    return " ".join(filter(None, (policy, *more)))
