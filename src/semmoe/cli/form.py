"""Build the options of a command from settings dataclasses: name, type, bounds, default and help of each field."""

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import Enum
from functools import partial, wraps
from typing import Annotated, Any

import typer

KEYWORD = inspect.Parameter.KEYWORD_ONLY


def takes(**kinds: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command: the options of the dataclass `kinds[name]` replace the parameter `name`.

    The command gets a function as this parameter, which makes the dataclass from the given options and from further
    fields by keyword. An option that was not given is None, and its field keeps its default. Fields of several
    dataclasses that have the same name share one option.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        names = {name for kind in kinds.values() for name in options_of(kind)}

        @wraps(command)
        def run(**given: Any) -> Any:
            chosen = {name: _value(given.pop(name)) for name in names}
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
    """Make a dataclass from the given options, by name; more: further fields by name."""
    values = {}
    for one in fields(kind):
        value = given.get(one.name)
        if is_dataclass(one.default_factory):
            values[one.name] = make(one.default_factory, given)
        elif "help" in one.metadata and value is not None:
            values[one.name] = None if one.metadata["zero_is_none"] and value == 0 else value
    return kind(**values | more)


def _parameters(kind: Any) -> dict[str, inspect.Parameter]:
    return {
        name: inspect.Parameter(name, KEYWORD, default=None, annotation=hint) for name, hint in options_of(kind).items()
    }


def options_of(kind: Any) -> dict[str, Any]:
    """The annotated type of each option by name, including those of nested dataclasses."""
    found: dict[str, Any] = {}
    for one in fields(kind):
        if is_dataclass(one.default_factory):
            found |= options_of(one.default_factory)
        elif "help" in one.metadata:
            found[one.name] = _hint(one)
    return found


def _hint(one: Field) -> Any:
    shown = one.metadata
    default = "" if one.default in (None, False, MISSING) else f" Default: {one.default}."
    common = {"help": shown["help"] + default, "rich_help_panel": shown["panel"], "show_default": False}
    if "choices" in shown:
        members: Any = {name: name for name in shown["choices"]}
        named: Any = Enum("Choice", members, type=str)  # type: ignore[misc]
        return Annotated[named | None, typer.Option(**common)]
    if "low" not in shown:
        return Annotated[bool | None, typer.Option(f"--{one.name.replace('_', '-')}", **common)]
    low = 0 if shown["zero_is_none"] else shown["low"]
    kind: Any = float if "float" in str(one.type) else int
    return Annotated[kind | None, typer.Option(min=low, max=shown["high"], callback=finite, **common)]


def _value(given: Any) -> Any:
    return given.value if isinstance(given, Enum) else given


def finite(value: float | None) -> float | None:
    """A callback for options that refuses NaN, which would pass every comparison with bounds."""
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def with_changes(settings: Any, changes: list[str]) -> Any:
    """Return settings with other values. changes: "NAME=VALUE", where NAME is "part.field" in a nested dataclass."""
    for change in changes:
        name, _, text = change.partition("=")
        known = _numbers_and_choices(settings)
        if name not in known:
            raise ValueError(f"there is no setting {name}: --set takes {', '.join(known)}")
        settings = _changed(settings, name, text)
    return settings


def _numbers_and_choices(settings: Any, part: str = "") -> list[str]:
    """Names of the settings that have bounds or choices."""
    found: list[str] = []
    for one in fields(settings):
        value = getattr(settings, one.name)
        found += _numbers_and_choices(value, f"{one.name}.") if is_dataclass(value) else []
        found += [part + one.name] if one.metadata else []
    return found


def _changed(settings: Any, name: str, text: str) -> Any:
    first, _, rest = name.partition(".")
    if rest:
        return replace(settings, **{first: _changed(getattr(settings, first), rest, text)})
    one = settings.__dataclass_fields__[first]
    kind = str if "choices" in one.metadata else float if "float" in str(one.type) else int
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"--set {first}: {text!r} is not a number") from None
    return replace(settings, **{first: value})
