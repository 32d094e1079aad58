"""Shared parts of commands: options, shell completion, answers, and what words mean: a spec, a storage, a run.

Without words it is what is in this folder.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from trainer_lib.base.suggestions import nearest
from trainer_lib.errors import ConfigError, TrainflowError
from trainer_lib.storage import Store
from trainflow.flows.cli import presentation, terminal
from trainflow.flows.cli.presentation import shown
from trainflow.flows.records.past_runs import PastRun, find_run
from trainflow.flows.server.api import quiet_environment
from trainflow.flows.spec.spec import PipelineSpec, load_spec, spec_here, specs_here
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.tracking.mlflow_run import tracking_uri


def complete_recipe(incomplete: str) -> list[str]:
    """The names of trainflow's own recipes that begin with the text."""
    from trainer_lib.protocol.recipe_names import ABOUT

    return [name for name in ABOUT if name.startswith(incomplete)]


def complete_override(incomplete: str) -> list[tuple[str, str]]:
    """Keys of a spec (``train.args.seed=``), or the values behind a ``=``, that begin with the text, with their help.

    Arguments are many: they are listed behind ``train.args.``, and not before.
    """
    from trainflow.flows.spec.schema import spec_schema

    schema = spec_schema()
    key, equals, value = incomplete.partition("=")
    nodes = dict(_keys(schema, schema["properties"], ""))
    if equals:
        return [(f"{key}={text}", "") for text in _values(nodes.get(key, {})) if text.startswith(value)]
    depth = incomplete.count(".")
    return [
        (f"{name}=", str(node.get("description", "")).partition(". ")[0])
        for name, node in nodes.items()
        if name.startswith(incomplete) and (name.count(".") <= max(depth, 1) or ".args." not in name)
    ]


def _keys(schema: Mapping[str, Any], properties: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, node in properties.items():
        refs = [option["$ref"] for option in (node, *node.get("anyOf", ())) if "$ref" in option]
        section = schema["$defs"][refs[0].rpartition("/")[2]] if refs else {}
        if "properties" in section:
            yield from _keys(schema, section["properties"], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", node


def _values(node: Mapping[str, Any]) -> list[str]:
    options = [node, *node.get("anyOf", ())]
    values = [str(value) for option in options for value in option.get("enum", ()) if value is not None]
    return values + (["true", "false"] if any(option.get("type") == "boolean" for option in options) else [])


Spec = Annotated[
    Path | None,
    typer.Argument(help="The pipeline's spec, a YAML or JSON file; unset: the one in this folder.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Fields of the spec to set: train.args.learning_rate=1e-3.",
        autocompletion=complete_override,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Prefect's own log.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but warnings and failures.")]
Bare = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Show the result alone: no heading, no notes, no progress, no empty lines."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, everything else on stderr.")]


@dataclass(frozen=True)
class Form:
    """Options of a command that say in which form it shows what it does."""

    quiet: Quiet = False
    as_json: Json = False
    debug: Debug = False

    def console(self) -> Console:
        """The console of notes and progress."""
        return terminal.console(stderr=self.as_json, quiet=self.quiet)


@dataclass(frozen=True)
class BareForm(Form):
    """`Form` of a command whose answer is what it is called for: with `quiet` the answer alone is shown."""

    quiet: Bare = False


EPILOGS: dict[Callable[..., None], str] = {}
"""The ends of the commands' help texts."""


@dataclass(frozen=True)
class Answer:
    """The result of a command: its fields in JSON, what makes its lines for people, and the failure it ends with."""

    record: Mapping[str, Any]
    lines: Callable[[], Iterable[Text]]
    error: TrainflowError | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        code = 0 if self.error is None else self.error.exit_code
        return {"ok": not code, "exit_code": code, **self.record}

    def show(self, form: Form) -> None:
        """Print it."""
        if form.as_json:
            print_json(self.to_dict())
        elif isinstance(form, BareForm) or not form.quiet:
            terminal.show(list(self.lines()), bare=form.quiet)

    def end(self, form: Form) -> None:
        """End the command with its failure, if there is one."""
        if self.error is None:
            return
        if not form.as_json:
            raise self.error
        terminal.show(presentation.failure(self.error, debug=form.debug), stderr=True)
        raise typer.Exit(self.error.exit_code)


def command(examples: str) -> Callable[[Callable[..., Answer | None]], Callable[..., None]]:
    """Make a function a command, which prints the answer that it returns, and ends with its exit code.

    A parameter whose type is a dataclass stands for the options and arguments that its fields declare; those of `form`,
    which is the first one, come last. The lines of `examples` end the text of its ``--help``.
    """
    lines = textwrap.dedent(examples).strip().splitlines()

    def decorate(function: Callable[..., Answer | None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
        groups: dict[str, Any] = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
        flat: list[inspect.Parameter] = []
        for name, parameter in sorted(parameters.items(), key=lambda item: item[0] == "form"):
            if name in groups:
                flat += inspect.signature(groups[name], eval_str=True).parameters.values()
            else:
                flat.append(parameter.replace(annotation=hints[name]))

        @functools.wraps(function)
        def call(**options: Any) -> None:
            quiet_environment()
            for name, group in groups.items():
                options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
            if (answer := function(**options)) is not None:
                answer.show(options["form"])
                answer.end(options["form"])

        # Typer reads both.
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
        )
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
        # Lines are paragraphs, because others are joined.
        EPILOGS[call] = "\n\n".join(["Examples:", *lines])
        return call

    return decorate


def print_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object to standard output."""
    # default=str: a record may hold paths.
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


# -- what words mean ---------------------------------------------------------------------------------------------------

SPEC_ENDINGS = (".yaml", ".yml", ".json")

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id of a run or its beginning, its name, a tag, or last: the newest that has what the command needs.",
        show_default=False,
    ),
]
StorageUrl = Annotated[str | None, typer.Option("--storage", metavar="URL", help="A storage root, instead of a spec.")]


@dataclass(frozen=True)
class SpecWords:
    """Words of a command that name a spec, and change fields of it."""

    spec: Spec = None
    overrides: Overrides = None

    def choose(self) -> tuple[Path, list[str]]:
        """The file, and the overrides (`choose_spec_file`)."""
        return choose_spec_file(self.spec, self.overrides)

    def load(self, resolver: Resolver | None = None) -> PipelineSpec:
        """The spec, whose section `sweep` does not matter (`load_spec`)."""
        return load_spec(*self.choose(), resolver, needs_sweep=False)


@dataclass(frozen=True)
class PlaceWords:
    """Words of a command that name a storage."""

    place: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SPEC] [KEY=VALUE]...", help="A spec; unset: what is in this folder.", show_default=False
        ),
    ] = None
    storage: StorageUrl = None

    def choose(self, command: str) -> Chosen:
        """`choose` for a command that takes no other words. Raises ConfigError for other words as well."""
        for word in self.place or ():
            if not word.endswith(SPEC_ENDINGS) and "=" not in word:
                what = "This is neither a spec (.yaml, .yml, .json) nor KEY=VALUE."
                remedy = "Name the spec's file, or the storage: --storage URL."
                raise ConfigError(what, field="SPEC", value=word, remedy=remedy)
        return choose(self.place, self.storage, command=command)


@dataclass(frozen=True)
class Chosen:
    """A storage, the spec that names it, if one does, and the words of a command that name neither."""

    place: Store
    spec: PipelineSpec | None = None
    words: tuple[str, ...] = ()

    @property
    def storage(self) -> str:
        """Its address."""
        return self.place.url

    @property
    def tracking(self) -> TrackingConfig:
        """The tracking of its runs."""
        return TrackingConfig() if self.spec is None else self.spec.tracking

    def run(self, text: str) -> PastRun:
        """The run that `text` means. Raises ConfigError if there is none, or several."""
        return find_run(self.storage, text, field="RUN")


def choose(words: Sequence[str] | None, storage: str | None, *, command: str) -> Chosen:
    """The storage that a spec among `words`, a URL, or this folder names. Raises ConfigError."""
    specs = [word for word in words or () if word.endswith(SPEC_ENDINGS) and "=" not in word]
    overrides = [word for word in words or () if "=" in word]
    if len(specs) > 1:
        raise ConfigError("Give one spec.", field="SPEC", value=specs[1], remedy=f"Drop one: {specs[0]} comes first.")
    chosen = find_storage(Path(specs[0]) if specs else None, overrides, storage, command=command)
    rest = tuple(word for word in words or () if word not in specs and word not in overrides)
    return replace(chosen, words=rest)


def find_storage(spec: Path | None, overrides: list[str] | None, storage: str | None, *, command: str) -> Chosen:
    """The storage of a spec, or of what is in this folder. Raises ConfigError."""
    is_of_spec = spec is not None or bool(overrides)
    if storage is not None and is_of_spec:
        why = "Give a spec or a storage, not both."
        raise ConfigError(why, field="--storage", value=storage, remedy="Drop one.")
    if storage is None and (is_of_spec or spec_here() is not None):
        file, words = choose_spec_file(spec, overrides)
        parsed = load_spec(file, words, needs_sweep=False)
        # It need not exist: the first run makes it.
        return Chosen(Store.open(parsed.storage), parsed)
    if storage is not None or Path(".trainflow").is_dir():
        return Chosen(_existing(".trainflow" if storage is None else storage))
    what = "No runs were named, and this folder has neither a single spec nor .trainflow."
    remedy = f"Name a spec (trainflow {command} SPEC) or a storage (trainflow {command} --storage URL)."
    raise ConfigError(what, field=command, remedy=remedy)


def use_registry_here(address: str, *, command: str) -> None:
    """For a model in MLflow where no server is named: this process and its workers ask that of this folder's runs."""
    if not address.startswith("models:/") or os.environ.get("MLFLOW_TRACKING_URI"):
        return
    with contextlib.suppress(ConfigError):  # this folder has no runs: the model is refused where it is looked for
        chosen = find_storage(None, [], None, command=command)
        os.environ["MLFLOW_TRACKING_URI"] = tracking_uri(chosen.tracking, chosen.place)


def choose_spec_file(spec: Path | None, overrides: list[str] | None) -> tuple[Path, list[str]]:
    """The spec and the overrides among a command's words; without a spec pipeline.yaml here, else the only one here."""
    words = overrides or []
    # The first word of a command may be an override: then no spec was named.
    if spec is not None and "=" in str(spec) and not spec.exists():
        spec, words = None, [str(spec), *words]
    specs = [spec] if spec is not None else specs_here()
    if len(specs) == 1:
        return specs[0], words
    if not specs:
        remedy = "Name one (pipeline.yaml), or write a project: trainflow init NAME."
        raise ConfigError("No spec was named, and this folder has none.", field="SPEC", remedy=remedy)
    what = f"No spec was named, and this folder has several: {', '.join(map(str, specs))}."
    raise ConfigError(what, field="SPEC", remedy=f"Name one of them: {specs[0]}.")


def _existing(storage: str) -> Store:
    """The storage that a user named. Raises ConfigError for a path where no folder is; stores are not asked."""
    store = Store.open(storage, field="--storage")
    if not store.is_local or (folder := store.local_path()).is_dir():
        return store
    what, remedy = "There is no such folder.", "Name the folder or URL that a run used."
    if folder.exists():
        what, remedy = "This is a file, not a folder.", "Name the folder that a run used as its storage."
    elif folder.parent.is_dir() and (
        close := nearest(folder.name, [path.name for path in folder.parent.iterdir() if path.is_dir()])
    ):
        remedy = f'Did you mean "{shown(str(folder.with_name(close)))}"?'
    raise ConfigError(what, field="--storage", value=storage, remedy=remedy)
