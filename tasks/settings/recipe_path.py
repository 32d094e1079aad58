"""The setting that names a recipe: a Python file, or one of trainflow's own recipes by its name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer
from pydantic_core import PydanticCustomError

from trainer_lib.base.suggestions import suggestion
from trainer_lib.protocol.recipe_names import ABOUT, is_recipe_name, recipe_file, recipe_name


def _read_recipe(value: Any) -> Any:
    """The file of a recipe that is given by name; a path stays as it is."""
    if not is_recipe_name(value):
        return value
    try:
        return recipe_file(value)
    except KeyError:
        hint = f"{suggestion(value, ABOUT)} A file of your own is named like recipe.py."
        raise PydanticCustomError("recipe_name", "no recipe {value}. {hint}", {"value": value, "hint": hint}) from None


RecipePath = Annotated[str, BeforeValidator(_read_recipe), PlainSerializer(recipe_name)]
"""A recipe's file. A spec may name one of trainflow's own, and is written down with that name on every machine."""
