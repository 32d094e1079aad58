"""The recipes that a spec takes by name: each is one file in `trainer_lib/recipes`. Nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path

KEPT = "(trainflow)"
"""Folder of trainflow's recipes among the files of a run or of a model."""
FOLDER = Path(__file__).resolve().parents[1] / "recipes"

ABOUT = {
    "causal-language-modeling": "Texts to a model of transformers that continues them.",
    "embeddings": "Vectors of texts, near where texts belong together, with a model of transformers.",
    "image-classification": "Images to classes, or to a number.",
    "preference-optimization": "Answers that are preferred to others, with a model of transformers (DPO).",
    "question-answering": "The part of a text that answers a question, with a model of transformers.",
    "sequence-to-sequence": "Texts to other texts, such as summaries, with a model of transformers.",
    "supervised-fine-tuning": "Conversations to a model of transformers that answers.",
    "tabular-classification": "Rows of a table to classes.",
    "tabular-regression": "Rows of a table to a number.",
    "text-classification": "Texts to classes, or to a number, with a model of transformers.",
    "time-series-forecasting": "The next steps of one time series or many.",
    "token-classification": "Words of a text to a tag each, with a model of transformers.",
}
"""Name -> what the recipe is for."""


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
