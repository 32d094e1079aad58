"""The options of a recipe, checked against those that it knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError


class PathOptions(TypedDict):
    """The options of recipes that are paths; relative ones start from the folder of the spec."""

    folder: NotRequired[Path]
    files: NotRequired[dict[str, Path]]
    template: NotRequired[Annotated[Path, ".jinja"]]


def choose(options: Mapping[str, Any], defaults: Mapping[str, Any], *, field: str) -> dict[str, Any]:
    """The options, with the default of each that is not given.

    Args:
        defaults: option -> its value where it is not given; a value of None takes any type.
        field: the setting that holds the options, for errors.

    Raises:
        ConfigError: an option is unknown, or has another type than its default.
    """
    for name, value in options.items():
        if name not in defaults:
            what, remedy = "The recipe has no such option.", suggestion(name, defaults)
            raise ConfigError(what, field=f"{field}.{name}", value=value, remedy=remedy)
        wanted = defaults[name]
        kinds = (int, float) if isinstance(wanted, float) else (type(wanted),)
        wrong = not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(wanted, bool))
        if wanted is not None and wrong:
            what, remedy = f"This option takes {_KINDS[type(wanted)]}.", f"The default is {wanted!r}."
            raise ConfigError(what, field=f"{field}.{name}", value=value, remedy=remedy)
    return {**defaults, **options}


def require_choice(value: Any, choices: Mapping[str, Any] | tuple[str, ...], *, field: str) -> None:
    """Raise ConfigError for a value that is not one of the choices."""
    if value not in choices:
        what = "This is not one of the choices."
        raise ConfigError(what, field=field, value=value, remedy=suggestion(str(value), choices))


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping of names to values",
}
