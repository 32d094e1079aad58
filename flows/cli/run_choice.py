"""The spec, the storage and the run that a command's words mean; without words what is in this folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from trainer_lib.base.suggestions import nearest
from trainer_lib.errors import ConfigError
from trainer_lib.storage import Store
from trainflow.flows.cli.options import Overrides, Spec
from trainflow.flows.cli.presentation import shown
from trainflow.flows.records.past_runs import PastRun, find_run
from trainflow.flows.spec.spec import PipelineSpec, load_spec, spec_here, specs_here
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.keys.resolver import Resolver
from trainflow.tasks.tracking.mlflow_run import tracking_uri

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
    """A storage, its tracking settings, the words of a command that do not name it, and the pipeline of its spec."""

    place: Store
    tracking: TrackingConfig
    words: tuple[str, ...] = ()
    pipeline: str | None = None

    @property
    def storage(self) -> str:
        """Its address."""
        return self.place.url

    def run(self, text: str) -> PastRun:
        """The run that `text` means. Raises ConfigError if there is none, or several."""
        return find_run(self.storage, text, field="RUN")


def choose(words: Sequence[str] | None, storage: str | None, *, command: str) -> Chosen:
    """The storage that a spec among `words`, a URL, or this folder names. Raises ConfigError."""
    specs = [word for word in words or () if word.endswith(SPEC_ENDINGS) and "=" not in word]
    overrides = [word for word in words or () if "=" in word]
    chosen = find_storage(Path(specs[0]) if specs else None, overrides, storage, command=command)
    rest = tuple(word for word in words or () if word not in specs and word not in overrides)
    return replace(chosen, words=rest)


def find_storage(spec: Path | None, overrides: list[str] | None, storage: str | None, *, command: str) -> Chosen:
    """The storage and the tracking settings of a spec, or of what is in this folder. Raises ConfigError."""
    spec, overrides, storage = choose_spec_or_storage(spec, overrides, storage)
    if spec is not None:
        parsed = load_spec(spec, overrides, needs_sweep=False)
        # It need not exist: the first run makes it.
        return Chosen(Store.open(parsed.storage), parsed.tracking, pipeline=parsed.name)
    if storage is not None:
        return Chosen(_existing(storage), TrackingConfig())
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
    spec, words = _divide(spec, overrides)
    specs = [spec] if spec is not None else specs_here()
    if len(specs) == 1:
        return specs[0], words
    if not specs:
        remedy = "Name one (pipeline.yaml), or write a project: trainflow init NAME."
        raise ConfigError("No spec was named, and this folder has none.", field="SPEC", remedy=remedy)
    what = f"No spec was named, and this folder has several: {', '.join(map(str, specs))}."
    raise ConfigError(what, field="SPEC", remedy=f"Name one of them: {specs[0]}.")


def choose_spec_or_storage(
    spec: Path | None, overrides: list[str] | None, storage: str | None
) -> tuple[Path | None, list[str], str | None]:
    """The spec with its overrides, or the storage, that a command means; None for both: this folder has neither."""
    spec, words = _divide(spec, overrides)
    if storage is not None:
        if spec is not None or words:
            why = "Give a spec or a storage, not both."
            raise ConfigError(why, field="--storage", value=storage, remedy="Drop one.")
        return None, [], storage
    if spec is not None or words:
        return *choose_spec_file(spec, words), None
    if (here := spec_here()) is not None:
        return here, [], None
    return None, [], ".trainflow" if Path(".trainflow").is_dir() else None


def _divide(spec: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """The first word of a command may be an override: then no spec was named."""
    words = overrides or []
    if spec is None or "=" not in str(spec) or spec.exists():
        return spec, words
    return None, [str(spec), *words]


def _existing(storage: str) -> Store:
    """The storage that a user named. Raises ConfigError for a path where no folder is; stores are not asked."""
    store = Store.open(storage, field="--storage")
    if not store.is_local or (folder := store.local_path()).is_dir():
        return store
    if folder.exists():
        remedy = "Name the folder that a run used as its storage."
        raise ConfigError("This is a file, not a folder.", field="--storage", value=storage, remedy=remedy)
    siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    close = nearest(folder.name, siblings)
    remedy = (
        f'Did you mean "{shown(str(folder.with_name(close)))}"?' if close else "Name the folder or URL that a run used."
    )
    raise ConfigError("There is no such folder.", field="--storage", value=storage, remedy=remedy)
