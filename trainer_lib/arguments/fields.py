"""How an argument is declared: its default, what it means and in which unit, its bounds, and what it can change.

`affects` decides which content keys an argument belongs to:

    ============  ==============================================  ============  ===================
    value         what the argument can change                    train         evaluate, predict
    ============  ==============================================  ============  ===================
    "weights"     only how the weights come about                 key           -
    "outputs"     what the model computes for a sample            key           key
    "evaluation"  what an evaluation reports                      if it counts  key
    "selection"   when evaluations happen, and what they choose   if it counts  -
    "nothing"     where it runs, how it is shown, its speed       -             -
    ============  ==============================================  ============  ===================

An evaluation counts for training where it decides which weights come out, see `numeric.evaluation_matters`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

Affects = Literal["weights", "outputs", "evaluation", "selection", "nothing"]

_MISSING = dataclasses.MISSING


def arg(
    default: Any = _MISSING,
    help: str = "",
    *,
    affects: Affects,
    unit: str | None = None,
    factory: Callable[[], Any] | None = None,
    choices: Iterable[str] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    secret: bool = False,
) -> Any:
    """Declare one argument of a dataclass.

    Args:
        default, factory: the default value, or a function that makes it.
        help: one sentence; shown by `--help`.
        affects: see the module's docstring.
        unit: the unit of a number ("steps", "seconds", "samples"); required by the tests for every number.
        choices: allowed texts, where an enum would be too much.
        ge, gt, le, lt: bounds of a number, checked at construction.
        secret: never shown in errors, reprs or dumps.
    """
    bounds = {name: bound for name, bound in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if bound is not None}
    metadata = {
        "help": help,
        "unit": unit,
        "affects": affects,
        "choices": None if choices is None else tuple(choices),
        "bounds": bounds,
        "secret": secret,
    }
    # A repr gets into logs and tracebacks, so it leaves secrets out.
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata, repr=not secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def field_map(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """The dataclass's fields by name."""
    return {field.name: field for field in dataclasses.fields(cls)}


@functools.cache
def field_hints(cls: type[Any]) -> Mapping[str, Any]:
    """The resolved type of every field. A subclass's annotation that cannot be resolved at run time counts as Any."""
    hints: dict[str, Any] = {}
    # Bases first: a subclass's own annotation replaces theirs.
    for base in reversed(cls.__mro__):
        module = sys.modules.get(base.__module__)
        for name, annotation in inspect.get_annotations(base).items():
            # One at a time: typing gives up on all annotations of a class when one cannot be resolved.
            holder = types.SimpleNamespace(__annotations__={name: annotation})
            try:
                hints.update(typing.get_type_hints(holder, globalns=vars(module) if module else {}))
            except (NameError, TypeError, AttributeError):
                hints[name] = Any
    return hints
