"""How a refused configuration is explained: one line per problem, with field, range and remedy."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

_TYPE_NAMES = {int: "integer", float: "number", bool: "true or false", str: "text", dict: "mapping", list: "list"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "too_short", "string_too_short"}
_MAX_SHOWN = 80  # characters of an offending value


@dataclass(frozen=True, slots=True)
class Problem:
    """One refused field: dotted path, what is wrong, the value given, what is allowed, what to do."""

    path: str
    what: str
    got: object
    allowed: str
    remedy: str

    def __str__(self) -> str:
        shown = repr(self.got)
        shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "…"
        return f"{self.path}: {self.what} (got {shown}); allowed: {self.allowed}; {self.remedy}"


class ConfigError(ValueError):
    """The configuration cannot be served; `problems` and the message list every reason, one a line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class Refused(ValueError):
    """Raised inside a pydantic validator; the paths of its problems are relative to what is validated."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Allowed values of a type with its constraints, in words: `integer >= 1`, `one of a, b`, `number > 0 or null`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return describe(inner, [*metadata, *extra])
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part, metadata if part is not type(None) else ()) for part in get_args(annotation))
    if annotation is type(None):
        return "null"
    if origin is Literal:
        choices = get_args(annotation)
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(str, choices))
    if origin in (list, dict) and not get_args(annotation):  # `List` and `Dict`, as Ray's schema has them
        return describe(origin, metadata)
    if origin is list:
        return f"list of ({describe(get_args(annotation)[0])})" + _bounds(metadata)
    if origin is dict:
        return f"mapping of name to {describe(get_args(annotation)[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping of its keys"
    return _TYPE_NAMES.get(annotation, "any value") + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    found = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            found.append(_bounds(item.metadata).strip())
            continue
        limits = ((sign, getattr(item, name, None)) for name, sign in _BOUNDS.items())
        found += [f"{sign} {limit}" for sign, limit in limits if limit is not None]
        if getattr(item, "min_length", None):
            found.append("(not empty)")
        if pattern := getattr(item, "pattern", None):
            found.append(f"matching {pattern}")
    words = " and ".join(word for word in found if word)
    return f" {words}" if words else ""


def bounds_text(low: float, high: float | None) -> str:
    """A range in words."""
    return f">= {low}" if high is None else f">= {low} and <= {high}"


def field_names(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields of a model by the names that a file has for them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def allowed_values(field: FieldInfo) -> str:
    """Allowed values of a model's field, in words."""
    return describe(field.annotation, field.metadata)


def suggestion(name: str, choices: Iterable[str]) -> str:
    """`did you mean ...?`, or an empty text when nothing is close."""
    close = get_close_matches(str(name), list(choices), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}? " if close else ""


def problems_of(error: ValidationError, model: type[BaseModel], raw: Any) -> list[Problem]:
    """The problems behind a pydantic error on `raw`, one for each path, in the order of the file."""
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        path, field, owner, got = _locate(item["loc"], model, raw)
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, Refused):
            for problem in cause.problems:
                full = ".".join(filter(None, (path, problem.path)))
                found.setdefault(full, Problem(full, problem.what, problem.got, problem.allowed, problem.remedy))
            continue
        found.setdefault(path, _explain(item, path, field, owner, got))
    return list(found.values())


def _locate(
    loc: Sequence[int | str], model: type[BaseModel], raw: Any
) -> tuple[str, FieldInfo | None, type[BaseModel] | None, Any]:
    """Path, field, owning model and given value of a pydantic location (without its union tags)."""
    path, field, owner, value = "", None, None, raw
    current: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int) and isinstance(value, Sequence) and part < len(value):
            path, value, field, owner = f"{path}[{part}]", value[part], None, None
        elif isinstance(value, Mapping) and (part in value or (current and part in field_names(current))):
            path, value, owner = f"{path}.{part}" if path else str(part), value.get(part), current
            field = field_names(current).get(str(part)) if current else None
            current = _submodel(field.annotation) if field else None
        else:
            break
    return path, field, owner, value


def _submodel(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _explain(
    item: Mapping[str, Any], path: str, field: FieldInfo | None, owner: type[BaseModel] | None, got: Any
) -> Problem:
    kind = item["type"]
    if kind == "extra_forbidden" and owner is not None:
        hint = getattr(owner, "MOVED", {}).get(path.rsplit(".", 1)[-1])
        name = path.rsplit(".", 1)[-1]
        remedy = hint or suggestion(name, field_names(owner)) + "rename the key or remove it"
        return Problem(path, "unknown key", got, ", ".join(field_names(owner)), remedy)
    message = str(item["msg"]).removeprefix("Value error, ")
    allowed = allowed_values(field) if field else message.removeprefix("Input should be ")
    if kind == "missing":
        return Problem(path, "required key is missing", None, allowed, "add it")
    if kind == "string_pattern_mismatch":
        what = "not of the right form"
    elif kind in _OUT_OF_RANGE:
        what = "out of range"
    elif kind == "literal_error":
        what = "not one of the choices"
    elif kind.endswith(("_type", "_parsing", "_from_float")):
        what = "wrong type"
    else:
        what = message
    return Problem(path, what, got, allowed, _default_remedy(field))


def _default_remedy(field: FieldInfo | None) -> str:
    if field is None or field.is_required():
        return "set an allowed value"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return "write its keys below it, or remove it to take the defaults"
    if isinstance(default, Enum) and not isinstance(default, str):  # how Ray's schema says that a key is not given
        return "set an allowed value or remove the line"
    return f"set an allowed value or remove the line (default {'null' if default is None else default})"
