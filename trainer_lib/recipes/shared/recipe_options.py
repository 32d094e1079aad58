"""The options that several recipes have, with their defaults, and the check of those that a spec gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from trainer_lib.base.suggestions import require_known, suggestion
from trainer_lib.errors import ConfigError

CLASS, SEVERAL, ORDER, NUMBER = TARGETS = ("class", "several", "order", "number")
"""The kinds of labels."""
LABEL: dict[str, Any] = {
    "label": None,  # column to predict; of several classes perhaps a list of columns of 0 and 1
    "target": CLASS,  # or several, order, number (`trainer_lib.recipes.shared.targets`)
    "label_separator": None,  # between several classes in a cell such as red;blue; None: the files have lists
    "order": [],  # classes in their order, the least first; numbers have one
    "threshold": 0.5,  # the probability from which on one of several classes is predicted
    "absent_classes": False,  # accept a split without rows of some class
}
"""The options of what is predicted (`prepare.options`), with their defaults."""
ROWS: dict[str, Any] = {
    "ignore": [],  # columns that are left out
    "rename": {},  # name of a column in the files -> name that the recipe, and new rows, have
    "read": {},  # how the files are written, where they do not show it (`data.rows.reading.Reading`)
    "id": None,  # column by which predictions name the rows; None: rows are counted over all files
    "files": {},  # split -> its file, in place of cutting the rows of prepare.sources, which names them as well
    "split": {},  # how rows are cut (`trainer_lib.recipes.tables.splitting`)
}
"""The options of files with rows (`prepare.options`), with their defaults."""
DEFAULTS: dict[str, Any] = {
    **LABEL,
    **ROWS,
    "features": None,  # columns to predict from; None: all that have no other use
    "categorical": [],  # columns whose numbers are names (a postcode), not amounts
    "dates": {},  # column of dates -> their form, as for strptime; None: the one form that fits all of them
    "hashed": {},  # column of free texts -> how many numbers their words become
    "merge": [],  # columns whose texts are the same where they differ in case or blanks only
    "missing": "refuse",  # numbers that are missing; or mean, which needs prepare.allow_nan=true
}
"""The options of the tabular recipes (`prepare.options`), with their defaults."""
TEXTS: dict[str, Any] = {
    **ROWS,
    "pretrained": None,  # name of the model on the Hub whose tokenizer is used
    "folder": None,  # or its folder
    "pad_token": None,  # fills up short texts, for a tokenizer that has no token for it
    "vocabulary": 4000,  # tokens of a vocabulary that is learned
    "max_length": 128,  # tokens of a text; longer ones are cut
}
"""The options of recipes for texts, with their defaults."""


class PathOptions(TypedDict):
    """The options of recipes that are paths; relative ones start from the folder of the spec."""

    folder: NotRequired[Path]
    files: NotRequired[dict[str, Path]]
    template: NotRequired[Annotated[Path, ".jinja"]]


def choose(options: Mapping[str, Any], defaults: Mapping[str, Any], *, field: str) -> dict[str, Any]:
    """The options, with the defaults of those that are not given.

    Args:
        defaults: option -> its value where it is not given; a value of None takes any type.
        field: the setting that holds the options, for errors.

    Raises:
        ConfigError: an option is unknown, or has another type than its default.
    """
    for name, value in options.items():
        require_known(name, defaults, "The recipe has no such option.", field=f"{field}.{name}", value=value)
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
