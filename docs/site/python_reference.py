"""The reference of the Python API, from signatures and docstrings, which griffe reads from the sources."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator

import griffe

from docs.site.gather import ROOT
from trainer_lib.arguments import TrainingArguments, fields

# Page -> title, and the package whose exported names it has.
_PAGES = {"trainflow.md": ("import trainflow", "trainflow"), "trainer_lib.md": ("The Trainer", "trainer_lib")}
# What a flow of one's own imports.
_STAGES = {
    "trainflow.tasks.prepare_data": "prepare_data",
    "trainflow.tasks.train": "train",
    "trainflow.tasks.evaluate": "evaluate",
    "trainflow.tasks.predict": "predict",
    "trainflow.tasks.push_to_hub": "push_to_hub",
    "trainflow.tasks.stage.task": "stage_task",
    "trainflow.tasks.stage.runner": "run_stage stage_key StageContext StageAttempt StageOutput",
    "trainflow.tasks.stage.manifest": "StageManifest",
}
_FIRST = ("Spec", "Run", "runs", "Trainer", "Seq2SeqTrainer", "TrainerCallback", "load_model", "LoadedModel")
_MEMBERS = (griffe.Kind.FUNCTION, griffe.Kind.ATTRIBUTE)
# Arguments have a page of their own.
_ELSEWHERE = {"TrainingArguments", "Seq2SeqTrainingArguments", "TFTrainingArguments"}


def pages() -> dict[str, str]:
    """Return the pages, by their file names."""
    # Without its warnings: our docstrings explain several parameters at once (`lr, beta: ...`).
    options = griffe.GoogleOptions(warnings=False, warn_unknown_params=False)
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser=griffe.Parser.google, docstring_options=options)
    houses = {name: loader.load(name) for name in ("trainer_lib", "trainflow")}
    written = {}
    for file, (title, module) in _PAGES.items():
        package = houses[module]
        names = [name for name in importlib.import_module(module).__all__ if name not in _ELSEWHERE]
        blocks = [_object(package[name], name) for name in sorted(names, key=_rank)]
        head = package.docstring.value.split("\n\n")[0] if package.docstring else ""
        written[file] = "\n".join((f"# {title}\n", f"{head}\n", *blocks))
    imported = [(module, name) for module, names in _STAGES.items() for name in names.split()]
    blocks = [_object(loader.modules_collection[f"{module}.{name}"], name, module) for module, name in imported]
    head = "# Stages\n\nWhat [a flow of your own](../python.md#a-flow-of-your-own) is built from.\n"
    written["stages.md"] = "\n".join((head, *blocks))
    written["arguments.md"] = _arguments()
    return written


def _rank(name: str) -> tuple[int, str]:
    """Sort what a reader looks for first to the front; the rest by name."""
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name.lower())


def _object(found: griffe.Object | griffe.Alias, name: str, module: str = "") -> str:
    """A name with its signature, its docstring and, of a class, its public members."""
    try:
        while isinstance(found, griffe.Alias):
            found = found.final_target
    except griffe.AliasResolutionError:  # a class of transformers
        value = getattr(importlib.import_module("trainer_lib"), name)
        return f"## {name}\n\nThat of `{value.__module__}`.\n"
    lines = [f"## {name}\n", *([f"`from {module} import {name}`\n"] if module else [])]
    if isinstance(found, griffe.Attribute):
        return "\n".join((*lines, _code(str(found.value) if found.value else name), _text(found)))
    lines += [_code(_signature(found, name)), _text(found)]
    if isinstance(found, griffe.Class):
        lines += _members(found)
    return "\n".join(lines)


def _members(cls: griffe.Class) -> Iterator[str]:
    for name, member in sorted(cls.all_members.items()):
        if name.startswith("_") or not member.docstring or member.kind not in _MEMBERS:
            continue
        yield f"### {cls.name}.{name}\n"
        if member.is_function:
            yield _code(_signature(member, name))
        yield _text(member)


def _signature(found: griffe.Object | griffe.Alias, name: str) -> str:
    """`name(parameters) -> what it returns`, one parameter a line where there are many."""
    function = found.all_members.get("__init__") if isinstance(found, griffe.Class) else found
    parameters = getattr(function, "parameters", None)
    if parameters is None:
        return f"class {name}"
    given = list(_written(parameters))
    gives = getattr(found, "returns", None)
    returns = f" -> {gives}" if gives else ""
    line = f"{name}({', '.join(given)}){returns}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(given) + f",\n){returns}"


def _written(parameters: griffe.Parameters) -> Iterator[str]:
    """The parameters as they are written in Python."""
    starred = False
    for each in parameters:
        if each.name in ("self", "cls"):
            continue
        kind = each.kind or griffe.ParameterKind.positional_or_keyword
        if kind is griffe.ParameterKind.keyword_only and not starred:
            starred = True
            yield "*"
        starred = starred or kind is griffe.ParameterKind.var_positional
        prefix = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        annotation = f": {each.annotation}" if each.annotation else ""
        equals = " = " if annotation else "="
        default = "" if prefix or each.default is None else f"{equals}{each.default}"
        yield f"{prefix}{each.name}{annotation}{default}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _text(found: griffe.Object | griffe.Alias) -> str:
    """The docstring: its text, and its sections as lists."""
    sections = found.docstring.parsed if found.docstring else []
    return "\n".join(_section(section) for section in sections)


def _section(section: griffe.DocstringSection) -> str:
    if isinstance(section, griffe.DocstringSectionText):
        return f"{section.value}\n"
    if isinstance(section, griffe.DocstringSectionAdmonition):
        return f"**{section.title}** {section.value.contents}\n"
    title = section.title or section.kind.value.capitalize()
    items = section.value if isinstance(section.value, list) else [section.value]
    return f"**{title}**\n\n" + "".join(f"- {_item(item)}\n" for item in items)


def _item(item: object) -> str:
    name = getattr(item, "name", "") or str(getattr(item, "annotation", "") or "")
    text = inspect.cleandoc(str(getattr(item, "description", item))).replace("\n", "\n    ")
    return f"`{name}`: {text}" if name else text


def _arguments() -> str:
    """The page of the training arguments: each with its default, what it means, and what it can change."""
    head = (
        "# Training arguments\n\nThe fields of `TrainingArguments`, which are `train.args` of a spec. *Changes* is "
        "what an argument can change, and decides which [keys](../concepts/keys.md) it is part of.\n\n"
    )
    rows = "| argument | default | means | changes |\n|---|---|---|---|\n"
    known = fields.declarations(TrainingArguments)
    listed = sorted(dataclasses.fields(TrainingArguments), key=lambda field: field.name)
    return head + rows + "".join(_argument(field, known[field.name]) for field in listed)


def _argument(field: dataclasses.Field[object], declared: fields.Declaration) -> str:
    default = "" if field.default is dataclasses.MISSING or field.default is None else f"`{field.default}`"
    meaning = str(field.metadata.get("help", "")).replace("|", "\\|")
    unit = f" Unit: {declared.unit}." if declared.unit else ""
    return f"| `{field.name}` | {default} | {meaning}{unit} | {declared.affects} |\n"
