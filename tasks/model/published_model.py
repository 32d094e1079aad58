"""The model that is published already beside the one to publish: both on the same test rows, by a paired bootstrap.

What was published with its metrics on resamples of just these rows is compared as it is. Otherwise the published model
is measured on the rows. That executes its code, which has to be that of the model to publish, or of a run on this
storage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.metric_names import read_metrics
from trainer_lib.errors import ConfigError
from trainer_lib.hub.base import Content, Published
from trainer_lib.hub.huggingface import download_snapshot
from trainer_lib.hub.transport import parse_target
from trainer_lib.model_folder.description import FILE, read_description
from trainer_lib.model_folder.locate import FoundModel, find_model
from trainer_lib.protocol.requests import MeasureRowsRequest, PreparedData
from trainer_lib.storage import Store
from trainer_lib.storage.commit import read_commit
from trainer_lib.trackers.mlflow.mlflow_registry import Score, Verdict, compare
from trainflow.tasks.configs import LaunchSettings, PublishConfig
from trainflow.tasks.model.logged_models import RESAMPLES, read_score
from trainflow.tasks.model.model_lineage import key_fields
from trainflow.tasks.stage.context import StageContext
from trainflow.tasks.stage.facts import EvaluateFacts, PrepareFacts, PublishFacts
from trainflow.tasks.stage.manifest import STAGES, StageManifest
from trainflow.tasks.stage.runner import StageAttempt
from trainflow.tasks.stage.worker import launch_request

if TYPE_CHECKING:
    from trainer_lib.hub.transport import Hub

EVALUATION = "evaluation"
"""Folder of a publication with the files of its evaluation."""
_FIELD = "publish.only_if"
_BYTES = 64 << 20


def judge_publication(
    config: PublishConfig,
    context: StageContext,
    hub: Hub,
    content: Content,
    data: StageManifest[PrepareFacts],
    evaluation: StageManifest[EvaluateFacts] | None,
    attempt: StageAttempt,
) -> tuple[Published, Verdict] | None:
    """The newest publication, and whether the content's model is better; None where nothing is compared.

    That is where every model is published, none is published yet, or the newest publication has just this model.

    Raises:
        ConfigError: the models cannot be compared.
    """
    if config.compared_by is None:
        return None
    if evaluation is None:
        raise _refuse("Nothing was evaluated, so there is no comparison.", "Run evaluate as well.")
    newest = hub.find_newest()
    if newest is None or _has_same_model(newest, content):
        return None
    score = read_score(evaluation, config.compared_by, config.greater_is_better, field="publish.metric")
    split = next(name for name in evaluation.metrics if score.metric.startswith(f"{name}_"))
    repo = parse_target(hub.target).repo
    store = Store.open(newest.url if repo is None else download_snapshot(repo, revision=newest.revision))
    best = _read_score(store, split, score)
    if best is None:
        found = _require_known_code(context, newest, store, content)
        best = _measure(context, found, data, evaluation, split, score, attempt)
    return newest, compare("of this run", score, newest.revision, best)


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
    return _scored(score, value, resampled)


def _scored(score: Score, value: float, resampled: Any) -> Score:
    better, rows = score.is_greater_better, score.rows
    return Score(metric=score.metric, value=value, rows=rows, is_greater_better=better, resampled=tuple(resampled))


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
    stages = Store.open(context.storage).child(STAGES, "push-to-hub")
    for folder in map(stages.child, stages.children()):
        commit = read_commit(folder)
        facts = None if commit is None else StageManifest.from_commit(folder.url, commit).facts
        if isinstance(facts, PublishFacts) and facts.held is None:
            yield facts.published_digest


def _measure(
    context: StageContext,
    found: FoundModel,
    data: StageManifest[PrepareFacts],
    evaluation: StageManifest[EvaluateFacts],
    split: str,
    score: Score,
    attempt: StageAttempt,
) -> Score:
    """The published model's score on the rows of this run's split, and on the same resamples."""
    attempt.progress.event({"event": "progress", "message": f"measures the published model on the rows of {split}"})
    asked: Mapping[str, Any] = key_fields(evaluation)
    request = MeasureRowsRequest(
        output=attempt.store.url,
        model=found.url,
        digest=found.digest(),
        code=found.description.code_digest,
        data=PreparedData(data.url, data.facts.splits, data.facts.info, data.files),
        split=split,
        metrics=read_metrics(asked.get("metrics") or []),
        resamples=len(score.resampled),
        is_on_cpu=bool(found.description.args.get("use_cpu")),
    )
    measured = launch_request(request, LaunchSettings(processes=1), context, attempt)
    name = score.metric.removeprefix(f"{split}_")
    if name not in measured.metrics or len(measured.resampled.get(name, ())) != len(score.resampled):
        raise _refuse(
            f"The published model has no {name} on each resample of the rows.", "Name another publish.metric."
        )
    return _scored(score, measured.metrics[name], measured.resampled[name])


def _refuse(what: str, remedy: str) -> ConfigError:
    return ConfigError(what, field=_FIELD, value="better", remedy=remedy)
