"""The draft of a model card that the Trainer writes: what the caller sets, what a card already has, what is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_lib.arguments import TrainingArguments
from trainer_lib.hub.card import Card, tidy_metrics
from trainer_lib.state import TrainerState

REPOSITORY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# Arguments that say where things are, not how the model was trained.
_PLACES = ("output_dir", "logging_dir", "resume_from_checkpoint", "local_rank")


@dataclass(frozen=True)
class CardDetails:
    """What a caller of `create_model_card` sets; each replaces what the Trainer knows. See `Card`."""

    language: str | Sequence[str] | None = None
    license: str | None = None
    tags: str | Sequence[str] | None = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: str | Sequence[str] | None = None
    dataset_tags: str | Sequence[str] | None = None
    dataset: str | Sequence[str] | None = None
    dataset_args: str | Sequence[str] | None = None


@dataclass(frozen=True)
class CardFacts:
    """What the Trainer knows when it writes a card.

    Attributes:
        name: of the target, without its owner; the title when none is set.
        present: YAML head of the card in output_dir; empty without one.
    """

    name: str
    present: Mapping[str, Any]
    model: Any
    state: TrainerState
    args: TrainingArguments


def draft_card(details: CardDetails, facts: CardFacts, *, licence_of: Callable[[str | None], str | None]) -> Card:
    """The card: `details` first, then what the present card says, then what the model and the training say.

    Args:
        licence_of: base model's repository -> its licence, asked only when neither names one.
    """
    present, model = facts.present, facts.model
    base = details.finetuned_from or _source_repository(model) or _text(present.get("base_model"))
    tags = [*_as_list(present.get("tags")), *_as_list(details.tags), *_as_list(getattr(model, "model_tags", None))]
    return Card(
        title=details.model_name or facts.name,
        description="Draft of a card, written by the Trainer: complete it.",
        license=details.license or _text(present.get("license")) or licence_of(base),
        tags=tags,
        base_model=base,
        metrics=tidy_metrics({"eval": _newest_metrics(facts.state.log_history)}),
        arguments=_changed_arguments(facts.args),
        facts={"optimizer steps": facts.state.global_step, "epochs": round(float(facts.state.epoch), 2)},
        library=_text(present.get("library_name")) or "trainflow",
        language=_as_list(details.language) or _as_list(present.get("language")),
        tasks=_as_list(details.tasks) or _as_list(present.get("pipeline_tag")),
        datasets=_as_list(details.dataset_tags) or _as_list(present.get("datasets")),
        dataset_names=_as_list(details.dataset),
        dataset_args=_as_list(details.dataset_args),
    )


def _source_repository(model: Any) -> str | None:
    """The repository that a transformers model was loaded from; None for a local folder, or any other model."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    # A relative folder has the form of a repository's name; one that exists here is a folder.
    found = isinstance(name, str) and bool(REPOSITORY.fullmatch(name)) and not Path(name).exists()
    return name if found else None


def _newest_metrics(log_history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `eval_` values of the newest log entry that has any."""
    for entry in reversed(log_history):
        measured = {name: value for name, value in entry.items() if name.startswith("eval_")}
        if measured:
            return measured
    return {}


def _changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that differ from their defaults, without those that only name places."""
    defaults = TrainingArguments().to_dict()
    return {
        name: value
        for name, value in args.to_dict().items()
        if value != defaults.get(name) and name not in _PLACES and not name.startswith(("hub_", "push_"))
    }


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
