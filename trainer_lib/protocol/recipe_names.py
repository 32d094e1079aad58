"""The recipes that a spec takes by name: each is one file in `trainer_lib/recipes`. Nothing heavy is imported here."""

from __future__ import annotations

import re
from pathlib import Path

KEPT = "(trainflow)"  # folder of trainflow's recipes among the files of a run or of a model
FOLDER = Path(__file__).resolve().parents[1] / "recipes"

_FIRST_LINE = re.compile(r'"""The recipe ([a-z-]+): (.+?)"*$')


def _find_recipes() -> dict[str, str]:
    """Name -> what the recipe is for, from the first line of its file, which is all that is read."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        with path.open(encoding="utf-8") as file:
            if match := _FIRST_LINE.match(file.readline()):
                found[match[1]] = match[2][0].upper() + match[2][1:]
    return found


ABOUT = _find_recipes()  # name -> what the recipe is for


def is_recipe_name(value: object) -> bool:
    """Whether the value of a spec's `recipe` has the form of a name, and not of a file: no ending, no folder."""
    return isinstance(value, str) and bool(value) and not {".", "/", "\\", "~"} & set(value)


def recipe_file(name: str) -> str:
    """The path of the recipe that has this name. Raises KeyError: none has it."""
    if name not in ABOUT:
        raise KeyError(name)
    return str(FOLDER / f"{name.replace('-', '_')}.py")


def installed_recipe(path: str) -> str | None:
    """The installed file of a recipe by name, given its path among the files of a model; None for a user's file.

    It is used in place of a copy: what recipes share is imported from the installed ones.
    """
    folder, _, name = path.partition("/")
    known = name.removesuffix(".py").replace("_", "-")
    return recipe_file(known) if folder == KEPT and known in ABOUT else None


def recipe_name(path: str) -> str:
    """The name of a recipe, given its file; the path as it is for a file of the user's."""
    name = Path(path).stem.replace("_", "-")
    return name if name in ABOUT and Path(path) == Path(recipe_file(name)) else path
