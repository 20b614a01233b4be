"""Build the options of a command from dataclasses: name, type, bounds, default and help of each field.

A field is an option if `option` gave it a help text, or if its type is annotated with an
option or an argument of typer. A nested dataclass adds its own fields.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import wraps
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer

KEYWORD = inspect.Parameter.KEYWORD_ONLY


def takes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: options replace each parameter whose type is a dataclass, which is then made from them.

    An option that was not given is None, and its field keeps its default. Fields of the same name share one option.
    """
    signature = inspect.signature(command, eval_str=True)
    kinds = {name: one.annotation for name, one in signature.parameters.items() if is_dataclass(one.annotation)}

    @wraps(command)
    def run(**given: Any) -> Any:
        made = {name: make(kind, given) for name, kind in kinds.items()}
        return command(**{name: made[name] if name in made else given[name] for name in signature.parameters})

    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        parameters |= options_of(kinds[name]) if name in kinds else {name: parameter.replace(kind=KEYWORD)}
    setattr(run, "__signature__", signature.replace(parameters=list(parameters.values())))  # noqa: B010
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    delattr(run, "__wrapped__")  # typer would look through it
    return run


def make(kind: Any, given: dict[str, Any]) -> Any:
    """Make a dataclass from the given options, by name; None: not given."""
    shown, values = options_of(kind), {}
    for one in fields(kind):
        value = given.get(one.name)
        if is_dataclass(one.default_factory):
            values[one.name] = make(one.default_factory, given)
        elif one.name in shown and value is not None:
            unlimited = one.metadata.get("zero_is_none") and value == 0
            values[one.name] = None if unlimited else value
    return kind(**values)


def options_of(kind: Any) -> dict[str, inspect.Parameter]:
    """The option of each field by name, including those of nested dataclasses."""
    found: dict[str, inspect.Parameter] = {}
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        if is_dataclass(one.default_factory):
            found |= options_of(one.default_factory)
        elif "help" in one.metadata:
            found[one.name] = inspect.Parameter(one.name, KEYWORD, default=None, annotation=_hint(one))
        elif get_origin(hints[one.name]) is Annotated:
            default = inspect.Parameter.empty if one.default is MISSING else one.default
            found[one.name] = inspect.Parameter(one.name, KEYWORD, default=default, annotation=hints[one.name])
    return found


def _hint(one: Field) -> Any:
    shown = one.metadata
    default = "" if one.default in (None, False, MISSING) else f" Default: {one.default}."
    common = {"help": shown["help"] + default, "rich_help_panel": shown["panel"], "show_default": False}
    if "choices" in shown:
        chosen: Any = Literal[shown["choices"]]
        return Annotated[chosen | None, typer.Option(**common)]
    if "low" not in shown:
        return Annotated[bool | None, typer.Option(f"--{one.name.replace('_', '-')}", **common)]
    low = 0 if shown["zero_is_none"] else shown["low"]
    kind: Any = float if "float" in str(one.type) else int
    return Annotated[kind | None, typer.Option(min=low, max=shown["high"], callback=finite, **common)]


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
            raise ValueError(f"semmoe has no setting {name}: --set takes {', '.join(known)}")
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
