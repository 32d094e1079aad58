"""The card of a published model, from the manifests of the stages that made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer_lib.base.durations import describe_seconds
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.paths import absolute_path
from trainer_lib.data.rows.column import LABELS
from trainer_lib.errors import TrainflowError
from trainer_lib.hub.base import ADAPTER, Source
from trainer_lib.hub.card import Card, Conversations, HardRows, Picture, parse_card_head
from trainer_lib.hub.pictures import as_file
from trainer_lib.model_folder.description import ModelDescription
from trainer_lib.recipes.tables.table_files import TableForm
from trainer_lib.storage import FileEntry
from trainflow.tasks.configs import PublishConfig
from trainflow.tasks.keys.keys import versions
from trainflow.tasks.model.model_lineage import changed_arguments, describe_lineage
from trainflow.tasks.model.outcome_tables import Outcome
from trainflow.tasks.model.portable_model import ADAPTER_CONFIG
from trainflow.tasks.stage.facts import TrainFacts
from trainflow.tasks.stage.goodput import Goodput
from trainflow.tasks.stage.manifest import StageManifest
from trainflow.tasks.stage.retry import Ledger

_CONFIG_BYTES = 16 << 20
_HISTORY_BYTES = 256 << 20
_TOKENIZER = "assets/tokenizer"


def describe_card(
    config: PublishConfig,
    name: str,
    inputs: Sequence[StageManifest],
    trained: ModelDescription | None,
    metrics: Mapping[str, Mapping[str, float]],
    files: Sequence[FileEntry],
    of_model: Mapping[str, Source],
    folder: str = ".",
) -> Card:
    """The content of the card of a model with the `inputs` prepare-data, train and perhaps evaluate.

    `files` are published with the card; those of the model among them are in `of_model`, by path. Without `trained`,
    the weights are published alone. Relative paths of the spec start at `folder`.
    """
    data, model = inputs[0], inputs[1]
    loader = _loader(of_model)
    return Card(
        title=config.title or name,
        description=config.description,
        tags=config.tags,
        metrics=metrics,
        data_name=name,
        data_digest=data.content_digest,
        rows={split: facts.rows for split, facts in data.facts.splits.items()},
        sources={source.source: source.digest for source in describe_lineage(name, [data]).sources},
        stage_keys={result.stage: result.key for result in inputs},
        stage_digests={result.stage: result.content_digest for result in inputs},
        arguments=changed_arguments(model),
        facts=_facts(model),
        curve=_history(model),
        versions=versions(),
        library="trainflow" if loader is None else loader[0],
        loader=loader,
        code_digest=None if trained is None else trained.code_digest,
        columns=_columns(trained),
        address=config.to if config.to and config.to.startswith("hf://") else None,
        files=files,
        is_merged=f"{ADAPTER}/{ADAPTER_CONFIG}" in of_model,
        confidence=getattr(inputs[2].facts, "confidence", None) if len(inputs) > 2 else None,
        **_origin(config, data, model, trained, folder),
    )


def _origin(
    config: PublishConfig, data: StageManifest, model: StageManifest, trained: ModelDescription | None, folder: str
) -> dict[str, Any]:
    """The base model with its licence, and the conversations that it was trained on, if these are the data."""
    conversations = _conversations(data.facts.info, trained)
    settings = {} if conversations is None else model.facts.model
    base, _, revision = str(config.base_model or settings.get("pretrained") or "").partition("@")
    return {
        "license": config.license or _licence_of_base(settings, folder),
        "base_model": base or None,
        "base_revision": revision or None,
        "conversations": conversations,
    }


def _columns(trained: ModelDescription | None) -> dict[str, str]:
    """The columns of new rows, for an example of their use."""
    if trained is None:
        return {}
    form = TableForm.of(trained.info)
    left_out = {"row_id", *LABELS}
    if form is not None and form.gathered:  # a question alone is an example
        left_out |= {form.gathered["into"], "new_tokens"}
    given = trained.info.get("new_columns") or trained.columns
    return {name: kind for name, kind in given.items() if name not in left_out}


def _conversations(info: Mapping[str, Any], trained: ModelDescription | None) -> Conversations | None:
    """The conversations that prepare has noted; None: the data has none."""
    template = info.get("chat_template")
    if not isinstance(template, str):
        return None
    names = ("documents", "tokens_in", "tokens_trained")
    splits = {split: tuple(int(counts[name]) for name in names) for split, counts in info["packing"].items()}
    has_tokenizer = trained is not None and any(entry.path.startswith(_TOKENIZER) for entry in trained.assets)
    tokenizer = _TOKENIZER if has_tokenizer else None
    return Conversations(template, info.get("system"), info["shapes"], splits, tokenizer)


def _licence_of_base(settings: Mapping[str, Any], folder: str) -> str | None:
    """The licence that the card in the base model's folder names; None: it is not known here."""
    try:
        card = Path(absolute_path(str(settings["folder"]), folder), "README.md").read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError):
        return None
    named = parse_card_head(card).get("license")
    return named if isinstance(named, str) else None


def add_outcomes(card: Card, outcomes: Sequence[Outcome], *, hardest_rows: int) -> Card:
    """The card with pictures of what the model gets right and wrong, and so many of its hardest rows with labels."""
    pictures = [picture for outcome in outcomes for picture in _pictures(outcome)]
    found = [(outcome.split, *outcome.hardest()) for outcome in (outcomes if hardest_rows else ())]
    hardest = [HardRows(split, columns, rows[:hardest_rows]) for split, columns, rows in found if rows]
    return replace(card, pictures=pictures, hardest=hardest)


def draw_files(outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """The pictures that the card shows: path next to the card -> content."""
    return {
        _picture_path(name, outcome): as_file(drawing)
        for outcome in outcomes
        for name, drawing in outcome.drawings().items()
    }


def _pictures(outcome: Outcome) -> Iterator[Picture]:
    titles = {"confusion": "Confusion matrix", "reliability": "Reliability", "residuals": "Residuals"}
    titles |= {"roc": "ROC curve", "precision-recall": "Precision-recall curve"}
    notes = {
        "confusion": "Rows are the true classes, columns the predicted ones.",
        "reliability": "How often a prediction is right, by how sure the model is of it. Calibrated is the diagonal. "
        + outcome.describe_calibration(),
        "residuals": f"Larger points have more rows. {outcome.describe_residuals()}",
        "roc": outcome.describe_curves(),
        "precision-recall": "",
    }
    for name in outcome.drawings():
        yield Picture(_picture_path(name, outcome), f"{titles[name]} of {outcome.split}", notes[name])


def _picture_path(name: str, outcome: Outcome) -> str:
    return f"evaluation/plots/{name}-{outcome.split}.svg"


def _facts(model: StageManifest[TrainFacts]) -> dict[str, Any]:
    facts = model.facts
    device = facts.environment.get("processor") if facts.device == "CPU" else facts.device
    hardware = f"{facts.world_size or 1} x {device or facts.device}" if facts.device else None
    shown = {
        "Parameters": facts.parameters,
        "Optimizer steps": facts.global_step,
        "Samples seen": facts.global_samples,
        "Hardware": hardware,
        "Training time": _training_time(model),
    }
    return {label: value for label, value in shown.items() if value is not None}


def _training_time(model: StageManifest) -> str | None:
    """The time of all attempts, with what was lost; None where it is not recorded."""
    try:
        seconds = Goodput.of(Ledger(model.store()).records()).all_s
    except TrainflowError:
        return None
    return describe_seconds(seconds) if seconds > 0 else None


def _history(model: StageManifest) -> list[dict[str, Any]]:
    """The trainer's log, which lies next to the model; empty for one that an older version trained."""
    try:
        found = parse_json(model.store().read_if_exists("history.json", limit=_HISTORY_BYTES) or b"[]", list)
    except (TrainflowError, ValueError):
        return []
    return [entry for entry in found if isinstance(entry, dict)]


def _loader(of_model: Mapping[str, Source]) -> tuple[str, str] | None:
    """The library and the class whose `from_pretrained` loads the model; None for a model of another kind."""
    if ADAPTER_CONFIG in of_model:
        return "peft", "AutoPeftModel"
    if "config.json" not in of_model:
        return None
    found = of_model["config.json"]
    try:
        config = parse_json(found.store.read_bytes(found.entry.path, limit=_CONFIG_BYTES), dict)
    except (TrainflowError, ValueError):
        return None
    if "model_type" not in config:
        return None
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else "AutoModel"
    return "transformers", str(first) if str(first).isidentifier() else "AutoModel"
