"""push-to-hub: the model with its card and metrics to a hub, once; publishing the same again makes nothing new.

With `only_if: better` the published model is compared with this one on the same test rows, by a paired bootstrap. What
was published with its metrics on resamples of just these rows is compared as it is. Otherwise the published model is
measured on the rows. That executes its code, which has to be that of this model, or of a run on this storage.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.metric_names import read_metrics
from trainer_lib.base.records import to_record
from trainer_lib.errors import CodeError, ConfigError
from trainer_lib.hub.base import Content, Published, Source, parse_target
from trainer_lib.hub.card import merge_card, render_card, tidy_metrics
from trainer_lib.hub.folder import open_hub
from trainer_lib.hub.huggingface import download_snapshot
from trainer_lib.model_folder.description import FILE, read_description
from trainer_lib.model_folder.lineage import FILE as LINEAGE_FILE
from trainer_lib.model_folder.locate import FoundModel, find_model
from trainer_lib.protocol.requests import OUTCOMES, MeasureRowsRequest, PreparedData
from trainer_lib.storage import FileEntry, Store
from trainer_lib.trackers.mlflow.mlflow_registry import Score, Verdict, compare
from trainflow.tasks.configs import LaunchSettings, PublishConfig
from trainflow.tasks.keys.keys import publish_key, publishes_code
from trainflow.tasks.model.logged_models import RESAMPLES, read_score
from trainflow.tasks.model.model_card import add_outcomes, describe_card, draw_files
from trainflow.tasks.model.model_lineage import add_lineage, describe_lineage, key_fields
from trainflow.tasks.model.outcome_tables import Outcome, read_outcomes
from trainflow.tasks.model.portable_model import (
    TrainedModel,
    code_texts,
    describe_model,
    published_model,
    refuse_tokens,
    require_adapters,
)
from trainflow.tasks.stage import progress as _progress
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import EvaluateFacts, PrepareFacts, PublishFacts, TrainFacts
from trainflow.tasks.stage.manifest import STAGES, StageManifest, look_up_in
from trainflow.tasks.stage.rerun import find_publication_problem, publication_target
from trainflow.tasks.stage.runner import StageAttempt, StageOutput, run_stage
from trainflow.tasks.stage.task import stage_task
from trainflow.tasks.stage.worker import launch_request

if TYPE_CHECKING:
    from trainer_lib.hub.folder import Hub

STAGE = "push-to-hub"
CARD = "README.md"
# A file of the model with such a name would take the place of what the publication writes itself.
_MADE_HERE = {CARD, "metrics.json", "trainflow.json", "COMMIT.json", FILE, LINEAGE_FILE}
EVALUATION = "evaluation"  # folder of a publication with the files of its evaluation
_FIELD = "publish.only_if"
_BYTES = 64 << 20


@stage_task(STAGE)
def push_to_hub(
    config: PublishConfig,
    context: StageContext,
    data: StageManifest[PrepareFacts],
    model: StageManifest[TrainFacts],
    evaluation: StageManifest[EvaluateFacts] | None = None,
) -> StageManifest[PublishFacts]:
    """Publish the model, unless just this content is published there already and still is.

    Forced, it publishes even if the manifest of an earlier publication is there; a hub that has the content still makes
    no new revision.

    Args:
        data, model, evaluation: the manifests of prepare-data, train and (when there is one) evaluate.

    Returns:
        The stage's manifest; its facts say where the publication is.
    """
    data, model = data.with_facts(PrepareFacts), model.with_facts(TrainFacts)
    trained = _model_with_code(config, context, data, model)
    require_adapters(config, model)
    key = publish_key(config, context, data, model, evaluation)

    def work(attempt: StageAttempt) -> StageOutput:
        return _Publication(config, context, data, model, evaluation, trained, attempt).make()

    def inspect(manifest: StageManifest[PublishFacts]) -> str | None:
        return find_publication_problem(config, context, manifest)

    return run_stage(key, context, work, retries=config.retries, inspect=inspect)


def _model_with_code(
    config: PublishConfig, context: StageContext, data: StageManifest[PrepareFacts], model: StageManifest[TrainFacts]
) -> TrainedModel | None:
    """The description of the model with its code; None where the weights are published alone."""
    if not publishes_code(config, context):
        return None
    try:
        trained = describe_model(config, context, data, model)
    except CodeError as changed:  # a run may take the model of an earlier one, whose code was another
        message = f"The weights are published without code: {changed.message}"
        _progress.publish({"event": "warning", "stage": STAGE, "message": message})
        return None
    refuse_tokens(trained.code)
    return trained


@dataclass(frozen=True)
class _Publication:
    """One attempt at a publication; without `trained`, of the weights alone."""

    config: PublishConfig
    context: StageContext
    data: StageManifest[PrepareFacts]
    model: StageManifest[TrainFacts]
    evaluation: StageManifest[EvaluateFacts] | None
    trained: TrainedModel | None
    attempt: StageAttempt

    @property
    def inputs(self) -> list[StageManifest]:
        """The manifests of the stages that made the model, and of the evaluation that measured it."""
        return [self.data, self.model, *([] if self.evaluation is None else [self.evaluation])]

    def make(self) -> StageOutput:
        """Publish the content with its card and lineage, unless its model is held back by a better one."""
        config, context = self.config, self.context
        with published_model(config, context, self.data, self.model, self.attempt) as (of_model, agreement):
            bare = self._content(of_model)
            code = None if self.trained is None else self.trained.description.code_digest
            to = publication_target(config, context)
            hub = open_hub(to, revision=config.revision, private=config.private)
            card = merge_card(hub.read_card(), bare.texts[CARD].decode(), field=to)
            lineage = describe_lineage(context.name, self.inputs, code_digest=code)
            content = add_lineage(replace(bare, texts={**bare.texts, CARD: card.encode()}), lineage)
            judged, held = self._judge(hub, content), None
            if judged is not None and not judged[1].promoted:
                done, held = judged[0], judged[1].reason
                message = f"The model is not published: {held}"
                _progress.publish({"event": "warning", "stage": STAGE, "message": message})
            else:
                verdict = {} if judged is None else {"verdict": to_record(judged[1])}
                content = replace(content, lineage={**content.lineage, **verdict})
                done = hub.publish(content, message=f"Publish {config.title or context.name} ({content.digest[:12]})")
        if not done.created and held is None:
            message = f"{done.target} holds just this content already: no new revision"
            _progress.publish({"event": "progress", "stage": STAGE, "message": message})
        home = f"{Store.open(context.storage).url}/"
        below = done.url.removeprefix(home) if done.url.startswith(home) else None
        facts = PublishFacts(done.target, done.url, done.revision, done.content_digest, done.created, below, held)
        # Only what this content decides is a file, so that the stage's own digest tells of content and not of places.
        store = self.attempt.store
        files = [store.write_bytes(path, text) for path, text in sorted(content.texts.items())]
        if judged is not None:
            files.append(store.write_bytes("verdict.json", judged[1].to_json().encode()))
        return StageOutput(files, metrics=agreement, facts=facts)

    def _content(self, of_model: Mapping[str, Source]) -> Content:
        config, context, evaluation, trained = self.config, self.context, self.evaluation, self.trained
        of_model = {path: source for path, source in of_model.items() if path not in _MADE_HERE}
        files = dict(of_model)
        if not files:
            what = "The train stage left no model to publish."
            raise ConfigError(what, field="publish", value=self.model.url, remedy="Run train again.")
        metrics: dict[str, Any] = {}
        outcomes: list[Outcome] = []
        if evaluation is not None:
            # Outcomes hold labels of the data: they stay on the storage, and pictures show them together.
            kept = [entry for entry in evaluation.files if not entry.path.startswith(f"{OUTCOMES}/")]
            more = [entry for entry in kept if entry.path not in _MADE_HERE]
            files |= {f"{EVALUATION}/{entry.path}": Source(evaluation.store(), entry) for entry in more}
            metrics = tidy_metrics(evaluation.metrics)
            outcomes = list(read_outcomes(evaluation, self.data.facts.info))
        published = [FileEntry(path, file.entry.size, file.entry.sha256) for path, file in sorted(files.items())]
        described = None if trained is None else trained.description
        folder = context.folder or str(Path(context.recipe).parent)
        card = describe_card(config, context.name, self.inputs, described, metrics, published, of_model, folder)
        card = add_outcomes(card, outcomes, hardest_rows=config.hardest_rows)
        texts = draw_files(outcomes) | {CARD: render_card(card).encode(), "metrics.json": _metrics_json(metrics)}
        stages = {result.stage: result.key for result in self.inputs}
        if trained is not None:
            weights = [FileEntry(path, file.entry.size, file.entry.sha256) for path, file in sorted(of_model.items())]
            files |= {entry.path: Source(self.data.store(), entry) for entry in trained.description.assets}
            texts |= code_texts(trained) | {FILE: replace(trained.description, weights=tuple(weights)).to_json()}
        return Content(files, texts, {"data_digest": self.data.content_digest, "stages": stages})

    def _judge(self, hub: Hub, content: Content) -> tuple[Published, Verdict] | None:
        """The newest publication, and whether the content's model is better; None where nothing is compared.

        That is where every model is published, none is published yet, or the newest publication has just this model.
        """
        if self.config.compared_by is None:
            return None
        if self.evaluation is None:
            raise _refuse("Nothing was evaluated, so there is no comparison.", "Run evaluate as well.")
        newest = hub.find_newest()
        if newest is None or _has_same_model(newest, content):
            return None
        better = self.config.greater_is_better
        score = read_score(self.evaluation, self.config.compared_by, better, field="publish.metric")
        measured = self.evaluation.metrics
        # The name of a split may begin with that of another one.
        split = next(name for name in measured if score.metric in {f"{name}_{metric}" for metric in measured[name]})
        repo = parse_target(hub.target).repo
        store = Store.open(newest.url if repo is None else download_snapshot(repo, revision=newest.revision))
        best = _read_score(store, split, score)
        if best is None:
            found = _require_known_code(self.context, newest, store, content)
            best = self._measure(found, self.evaluation, split, score)
        return newest, compare("of this run", score, newest.revision, best)

    def _measure(self, found: FoundModel, measured_by: StageManifest, split: str, score: Score) -> Score:
        """The published model's score on the rows of this run's split, and on the same resamples."""
        message = f"measures the published model on the rows of {split}"
        self.attempt.progress.event({"event": "progress", "message": message})
        asked = key_fields(measured_by)
        data = self.data
        request = MeasureRowsRequest(
            output=self.attempt.store.url,
            model=found.url,
            digest=found.digest(),
            code=found.description.code_digest,
            data=PreparedData(data.url, data.facts.splits, data.facts.info, data.files),
            split=split,
            metrics=read_metrics(asked.get("metrics") or []),
            resamples=len(score.resampled),
            is_on_cpu=bool(found.description.args.get("use_cpu")),
        )
        measured = launch_request(request, LaunchSettings(processes=1), self.context, self.attempt)
        name = score.metric.removeprefix(f"{split}_")
        if name not in measured.metrics or len(measured.resampled.get(name, ())) != len(score.resampled):
            what = f"The published model has no {name} on each resample of the rows."
            raise _refuse(what, "Name another publish.metric.")
        return replace(score, value=measured.metrics[name], resampled=measured.resampled[name])


def _metrics_json(metrics: Mapping[str, Mapping[str, float]]) -> bytes:
    # NaN and infinity are not JSON, and other programs read this file.
    strict = {
        split: {name: value if math.isfinite(value) else str(value) for name, value in sorted(values.items())}
        for split, values in metrics.items()
    }
    return json.dumps(strict, indent=2, allow_nan=False).encode() + b"\n"


def _has_same_model(newest: Published, content: Content) -> bool:
    """Whether a publication has the files of this content's model: another card is published without a question."""
    known = {entry.path: entry.sha256 for entry in newest.files}
    model = [path for path in content.files if not path.startswith(f"{EVALUATION}/")]
    return all(known.get(path) == content.files[path].entry.sha256 for path in model)


def _read_score(store: Store, split: str, score: Score) -> Score | None:
    """The score that was published, if it is of the same rows and as many resamples; None elsewhere."""
    files = (f"{EVALUATION}/{RESAMPLES}/{split}.json", "metrics.json")
    record, metrics = (parse_json(store.read_if_exists(path, limit=_BYTES) or b"{}") for path in files)
    name = score.metric.removeprefix(f"{split}_")
    value, resampled = metrics.get(split, {}).get(name), record.get("metrics", {}).get(name, ())
    if record.get("rows") != score.rows or len(resampled) != len(score.resampled) or not isinstance(value, int | float):
        return None
    return replace(score, value=value, resampled=tuple(resampled))


def _require_known_code(context: StageContext, newest: Published, store: Store, content: Content) -> FoundModel:
    """The published model. Raises ConfigError where it has no code, or code that is neither the content's nor ours."""
    if not store.exists(FILE):
        what = "Other rows were measured for the published model, and without code it cannot be measured on these."
        raise _refuse(what, "Publish the code as well, or set publish.only_if=always once.")
    found, mine = find_model(store.url), content.texts.get(FILE)
    if mine is not None and found.description.code_digest == read_description(mine, FILE).code_digest:
        return found
    described = hashlib.sha256(store.read_bytes(FILE, limit=_BYTES)).hexdigest()
    is_listed = any(entry.path == FILE and entry.sha256 == described for entry in newest.files)
    if not is_listed or newest.content_digest not in _list_published(context):
        what = (
            "Other rows were measured for the published model, and its code is not executed: no run here published it."
        )
        raise _refuse(
            what, "Compare them: trainflow evaluate MODEL FILE --against; then set publish.only_if=always once."
        )
    return found


def _list_published(context: StageContext) -> Iterator[str]:
    """The content digests of what pipelines of this storage have published: their code was executed here."""
    for folder in Store.open(context.storage).child(STAGES, STAGE).children():
        done = look_up_in(context.storage, STAGE, folder)
        if done is not None and isinstance(done.facts, PublishFacts) and done.facts.held is None:
            yield done.facts.published_digest


def _refuse(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, field=_FIELD, value="better", remedy=remedy)
