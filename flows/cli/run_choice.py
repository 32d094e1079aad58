"""Which run, of which storage, the commands about recorded runs mean."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trainer_lib.errors import ConfigError
from trainflow.flows.cli.ui import find_storage
from trainflow.flows.records.past_runs import PastRun, find_run
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.tracking.mlflow_run import tracking_uri

_SPEC_ENDINGS = (".yaml", ".yml", ".json")

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id of a run or its beginning, its name, a tag, or last: the newest that fits.",
        show_default=False,
    ),
]
Place = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SPEC] [KEY=VALUE]...", help="A spec; unset: what is in this folder.", show_default=False),
]
StorageUrl = Annotated[str | None, typer.Option("--storage", metavar="URL", help="A storage root, instead of a spec.")]


@dataclass(frozen=True)
class Chosen:
    """A storage, and the words of a command that do not name it."""

    storage: str
    tracking: TrackingConfig
    words: tuple[str, ...] = ()

    def run(self, text: str) -> PastRun:
        """The run that `text` means.

        Raises:
            ConfigError: none, or several.
        """
        return find_run(self.storage, text, field="RUN")


def choose(words: Sequence[str] | None, storage: str | None, *, command: str) -> Chosen:
    """The storage that a spec among `words`, an URL, or this folder names.

    Raises:
        ConfigError: the spec is bad, both are given, or this folder has neither.
    """
    given = list(words or [])
    specs = [word for word in given if word.endswith(_SPEC_ENDINGS) and "=" not in word]
    overrides = [word for word in given if "=" in word]
    spec = Path(specs[0]) if specs else None
    tracking, place = find_storage(spec, overrides, storage, command=command)
    return Chosen(place.url, tracking, tuple(word for word in given if word not in specs and word not in overrides))


def use_registry_here(address: str, *, command: str) -> None:
    """For a model in MLflow where no server is named: this process and its workers ask that of this folder's runs."""
    if not address.startswith("models:/") or os.environ.get("MLFLOW_TRACKING_URI"):
        return
    with contextlib.suppress(ConfigError):  # this folder has no runs: the model is refused where it is looked for
        config, place = find_storage(None, [], None, command=command)
        os.environ["MLFLOW_TRACKING_URI"] = tracking_uri(config, place)


def choose_place(words: Sequence[str] | None, storage: str | None, *, command: str) -> Chosen:
    """`choose` for a command that takes no other words.

    Raises:
        ConfigError: as there, and for a word that is neither a spec nor an override.
    """
    chosen = choose(words, storage, command=command)
    if chosen.words:
        raise ConfigError(
            "This is neither a spec (.yaml, .yml, .json) nor KEY=VALUE.",
            field="SPEC",
            value=chosen.words[0],
            remedy="Name the spec's file, or the storage: --storage URL.",
        )
    return chosen
