"""Build the options of a command from settings dataclasses: name, type, bounds, default and help of each field."""

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import partial, wraps
from typing import Annotated, Any

import typer

KEYWORD = inspect.Parameter.KEYWORD_ONLY


def takes(**kinds: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command: the options of the dataclass `kinds[name]` replace the parameter `name`.

    The command gets a function as this parameter, which makes the dataclass from the given options and from further
    fields by keyword. An option that was not given is None, and its field keeps its default. Fields of several
    dataclasses that have the same flag share one option.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        flags = {flag for kind in kinds.values() for flag in options_of(kind)}

        @wraps(command)
        def run(**given: Any) -> Any:
            chosen = {flag: _value(given.pop(flag)) for flag in flags}
            return command(**given, **{name: partial(make, kind, chosen) for name, kind in kinds.items()})

        parameters: dict[str, inspect.Parameter] = {}
        for name, parameter in signature.parameters.items():
            parameters |= _parameters(kinds[name]) if name in kinds else {name: parameter.replace(kind=KEYWORD)}
        setattr(run, "__signature__", signature.replace(parameters=list(parameters.values())))  # noqa: B010
        run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        delattr(run, "__wrapped__")  # typer would look through it
        return run

    return decorate


def make(kind: Any, given: dict[str, Any], **more: Any) -> Any:
    """Make a dataclass from the given options, by flag; more: further fields by name."""
    values = {}
    for one in fields(kind):
        flag, value = _flag(one), given.get(_flag(one))
        if is_dataclass(one.default_factory):
            values[one.name] = make(one.default_factory, given)
        elif "help" in one.metadata and value is not None:
            zero = one.metadata["zero_is_none"] and value == 0
            values[one.name] = None if zero else value * one.metadata["unit"] if flag in given else value
    return kind(**values | more)


def _parameters(kind: Any) -> dict[str, inspect.Parameter]:
    return {
        flag: inspect.Parameter(flag, KEYWORD, default=None, annotation=hint) for flag, hint in options_of(kind).items()
    }


def options_of(kind: Any) -> dict[str, Any]:
    """The annotated type of each option by flag, including those of nested dataclasses."""
    found: dict[str, Any] = {}
    for one in fields(kind):
        if is_dataclass(one.default_factory):
            found |= options_of(one.default_factory)
        elif "help" in one.metadata:
            found[_flag(one)] = _hint(one)
    return found


def _flag(one: Field) -> str:
    return one.metadata.get("flag") or one.name


def _hint(one: Field) -> Any:
    shown = one.metadata
    common = {"help": shown["help"] + _default(one), "rich_help_panel": shown["panel"], "show_default": False}
    if "choices" in shown:
        members: Any = {name: name for name in shown["choices"]}
        named: Any = Enum("Choice", members, type=str)  # type: ignore[misc]
        return Annotated[named | None, typer.Option(**common)]
    if "low" not in shown:
        return Annotated[bool | None, typer.Option(f"--{_flag(one).replace('_', '-')}", **common)]
    low, high = (bound if shown["unit"] == 1 else _units(one, bound) for bound in (shown["low"], shown["high"]))
    low = 0 if shown["zero_is_none"] else low
    kind: Any = float if "float" in str(one.type) else int
    return Annotated[kind | None, typer.Option(min=low, max=high, callback=finite, **common)]


def _units(one: Field, bound: float) -> int:
    unit = one.metadata["unit"]
    return -(-int(bound) // unit) if bound == one.metadata["low"] else int(bound) // unit


def _default(one: Field) -> str:
    """The text on a field's default in its help."""
    if one.default in (None, False, MISSING):
        return ""
    unit = one.metadata["unit"]
    return f" Default: {one.default if unit == 1 else one.default // unit}."


def _value(given: Any) -> Any:
    return given.value if isinstance(given, Enum) else given


def finite(value: float | None) -> float | None:
    """A callback for options that refuses NaN, which would pass every comparison with bounds."""
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
