"""Name -> policy: config files and command lines take their choices from here."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

P = TypeVar("P")
F = TypeVar("F", bound=Callable[..., object])


class PolicyError(ValueError):
    """A policy's name or parameter cannot be used; `field` says which, the message also says what would do."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class Registry(Generic[P]):
    """Factories of one kind of policy, made by name with keyword parameters only."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, Callable[..., P]] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorate a class or function so that `make(name, ...)` calls it; a name can be taken once."""
        if name in self._factories:
            raise RuntimeError(f"{self.kind} {name!r} is already registered")

        def add(factory: F) -> F:
            self._factories[name] = factory  # type: ignore[assignment]  # what it makes is checked by its tests
            return factory

        return add

    def names(self) -> list[str]:
        """All names that `make` accepts, sorted."""
        return sorted(self._factories)

    def parameters(self, name: str) -> dict[str, object]:
        """Parameter names and defaults of one policy; raises PolicyError if there is no such policy."""
        return {p.name: p.default for p in inspect.signature(self._factory(name)).parameters.values()}

    def make(self, name: str, **params: object) -> P:
        """One policy object; raises PolicyError for an unknown name or parameter and for a value out of range."""
        factory, known = self._factory(name), self.parameters(name)
        for field in params:
            if field not in known:
                choices = f"it takes {', '.join(known)}" if known else "it takes none"
                raise PolicyError(
                    f"{self.kind} {name!r} has no parameter {field!r}: {choices}. Remove or rename it.", field
                )
        try:
            return factory(**params)
        except PolicyError as error:
            raise PolicyError(f"{self.kind} {name!r}: {error}", error.field) from None

    def _factory(self, name: str) -> Callable[..., P]:
        try:
            return self._factories[name]
        except (KeyError, TypeError):  # TypeError: a list or a mapping where the name belongs
            raise PolicyError(f"no {self.kind} {name!r}. Choose one of: {', '.join(self.names())}.", "name") from None


def number(
    field: str, value: object, remedy: str, *, above: float = -math.inf, low: float = -math.inf, high: float = math.inf
) -> float:
    """`value` as a float if it is a finite number with above < value, low <= value <= high; else PolicyError."""
    if not isinstance(value, bool) and isinstance(value, int | float):
        if math.isfinite(value) and value > above and low <= value <= high:
            return float(value)
    limits = [
        text
        for text, bound in ((f"> {above:g}", above), (f">= {low:g}", low), (f"<= {high:g}", high))
        if math.isfinite(bound)
    ]
    raise PolicyError(f"{field} must be a number {' and '.join(limits)}, got {value!r}. {remedy}", field)


def whole(field: str, value: object, remedy: str, *, low: int) -> int:
    """`value` if it is an int >= low, else PolicyError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= low:
        return value
    raise PolicyError(f"{field} must be a whole number >= {low}, got {value!r}. {remedy}", field)


def flag(field: str, value: object, remedy: str) -> bool:
    """`value` if it is true or false, else PolicyError (the string "false" would be taken for true)."""
    if isinstance(value, bool):
        return value
    raise PolicyError(f"{field} must be true or false, got {value!r}. {remedy}", field)


def choice(field: str, value: object, choices: Iterable[str], remedy: str) -> str:
    """`value` if it is one of `choices`, else PolicyError."""
    allowed = list(choices)
    if isinstance(value, str) and value in allowed:
        return value
    raise PolicyError(f"{field} must be one of {', '.join(allowed)}, got {value!r}. {remedy}", field)
