"""Declarations of arguments: default, meaning, unit, bounds, and what an argument can change.

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
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

Affects = Literal["weights", "outputs", "evaluation", "selection", "nothing"]

_MISSING = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Accepts:
    """Marks an annotation: `Annotated[float, Accepts(int | float)]`.

    The parsers of transformers and TRL convert a word to one type, and refuse a field with several. They read the first
    one, and we read the other.
    """

    hint: Any


if TYPE_CHECKING:
    Steps = int | float
    OptionalSteps = int | float | None
    Words = str | list[str] | None
    Settings = dict[str, Any] | None
else:
    Steps = Annotated[float, Accepts(int | float)]
    OptionalSteps = Annotated[float | None, Accepts(int | float | None)]
    Words = Annotated[str | None, Accepts(str | list[str] | None)]
    Settings = Annotated[str | None, Accepts(dict[str, Any] | None)]  # a word on a command line is JSON


class Unset(int):
    """A default that other arguments may replace: readers see the number, `fill` sees that none was given."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The declaration of an argument, without its type and default."""

    # See the module's docstring; a field that a subclass adds without `arg` can change everything.
    affects: Affects = "weights"
    unit: str | None = None  # the unit of a number; None where there is none
    choices: tuple[Any, ...] | None = None  # the allowed texts; None for all
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # "ge", "gt", "le", "lt" and their numbers
    secret: bool = False  # never shown in errors, reprs or dumps
    by_arg: bool = False  # whether `arg` declared it, or a field that it overrides
    alone: bool = False  # no version of transformers has an argument of this name


class _Help(str):
    """The help text of an argument, which carries its declaration.

    Metadata holds nothing but what argparse takes: the parsers of transformers and TRL pass every key of it on.
    """

    declaration: Declaration

    @classmethod
    def of(cls, text: str, declaration: Declaration) -> Self:
        made = cls(text)
        made.declaration = declaration
        return made


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
    bare: bool = False,
    alone: bool = False,
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
        bare: transformers' parser, which wants a word after such a type, takes the flag alone for true.
        alone: no version of transformers has an argument of this name.
    """
    bounds = {name: bound for name, bound in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if bound is not None}
    allowed = None if choices is None else tuple(choices)
    known = Declaration(affects, unit, allowed, bounds, secret, by_arg=True, alone=alone)
    metadata: dict[str, Any] = {"help": _Help.of(help, known)}
    if bare:
        metadata |= {"nargs": "?", "const": True}
    # A repr gets into logs and tracebacks, so it leaves secrets out.
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata, repr=not secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


#: `arg` by what an argument affects: `weights(0.1, "…")` is `arg(0.1, "…", affects="weights")`.
weights = functools.partial(arg, affects="weights")
outputs = functools.partial(arg, affects="outputs")
evaluation = functools.partial(arg, affects="evaluation")
selection = functools.partial(arg, affects="selection")
nothing = functools.partial(arg, affects="nothing")


@functools.cache
def declarations(cls: type[Any]) -> Mapping[str, Declaration]:
    """The declaration of every field of a dataclass, by name; a field declared again keeps what its base declared."""
    found: dict[str, Declaration] = {}
    for base in reversed(cls.__mro__):
        own = vars(base).get("__dataclass_fields__", {})
        for name in inspect.get_annotations(base):
            if name not in own:
                continue
            text, choices = own[name].metadata.get("help"), own[name].metadata.get("choices")
            found[name] = text.declaration if isinstance(text, _Help) else found.get(name, Declaration())
            if not isinstance(text, _Help) and choices is not None:
                found[name] = dataclasses.replace(found[name], choices=tuple(choices))
    return found


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
                known = typing.get_type_hints(holder, globalns=vars(module) if module else {}, include_extras=True)
                marks = [mark.hint for mark in getattr(known[name], "__metadata__", ()) if isinstance(mark, Accepts)]
                hints[name] = marks[0] if marks else known[name]
            except (NameError, TypeError, AttributeError):
                hints[name] = Any
    return hints
