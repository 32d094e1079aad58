"""The model registry: models, versions, their aliases, and when the champion moves. Every step is safe to repeat.

A `ModelRecord` is what MLflow records of a trained model whose weights stay on the storage.

A version is created in one request with its tags and its description, and is found again by the digest of its model: a
process that dies in between leaves a whole version or none. Aliases are set after it. The version that was champion
before is a tag of the one that is. The metric on the resamples is an artifact of the version's run: a thousand numbers
in a tag would bury the others on MLflow's page.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.records import from_record, to_record
from trainer_lib.base.suggestions import number_words
from trainer_lib.errors import ConfigError
from trainer_lib.trackers.mlflow.mlflow_client import GONE, GoneError, RefusedError

if TYPE_CHECKING:
    from mlflow import MlflowClient

DIGEST_TAG = "trainflow.model_digest"
FOLDER = "trainflow"  # the folder of our files among a logged model's artifacts
CANDIDATE = "candidate"
CHAMPION = "champion"
BEFORE_TAG = "trainflow.champion_before"
OUTCOME_FILE = "registered.json"
"""In the folder of a run: what its registration came to (`Registered`), once the server has decided it."""
SCORE_TAG = "trainflow.score"
VERDICT_TAG = "trainflow.verdict"
LOW, HIGH = 0.05, 0.95
_ARTIFACTS = "registry"
_RESAMPLES_BYTES = 16 << 20
_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model as a LoggedModel of MLflow: a few kilobytes that name the weights by address and SHA-256.

    `digest` is of all that decides its predictions: a run has one LoggedModel of it. `columns` is the signature, types
    by column (`float32[8,8]`) without labels. Of a table, `required` columns may have any type that its files had.
    """

    name: str
    digest: str
    step: int
    columns: dict[str, str]
    required: tuple[str, ...] = ()
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FlavorFile:
    """A file, as committed, that a flavor of MLflow needs at `path` among the artifacts: `name` in the URL `folder`."""

    path: str
    folder: str
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """A flavor of MLflow besides the reference to the weights: the model loads by a library's own functions.

    `config` is its section of the MLmodel file; `files` are what it needs, weights included.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    files: tuple[FlavorFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Score:
    """A model's scores in `<split>_<name>` on the rows of a split, and on resamples that are the same for all models.

    `rows` is the SHA-256 of the rows; values on the resamples are shortened to 6 digits.
    """

    metric: str
    value: float
    rows: str
    is_greater_better: bool
    resampled: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a model becomes, or is, the champion, and why, in a sentence.

    `difference` is how much better it is on the rows, with its 5 % and 95 % quantile over the resamples; None where
    nothing was compared.
    """

    promoted: bool
    reason: str
    candidate: str
    champion: str | None = None
    metric: str | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    resamples: int = 0

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(to_record(self), allow_nan=False)


def compare(candidate: str, score: Score | None, champion: str | None, best: Score | None) -> Verdict:
    """Judge a version against the champion by a paired bootstrap: both were measured on the same resampled rows.

    Without a champion the candidate becomes it. Raises ConfigError for another metric, or other rows.
    """
    verdict = partial(Verdict, candidate=candidate, champion=champion)
    if champion is None or champion == candidate:
        reason = "It is the first champion." if champion is None else "It is the champion."
        return verdict(promoted=True, reason=reason)
    if score is None or best is None:
        who = f"version {candidate}" if score is None else f"the champion, version {champion},"
        reason = f"Nothing is known of how {who} scored: set register.metric and evaluate."
        return verdict(promoted=False, reason=reason)
    if (score.metric, score.rows) != (best.metric, best.rows):
        how = f"by {best.metric}" if score.metric != best.metric else "on other rows"
        what = f"The champion, version {champion}, was measured {how}, so version {candidate} cannot be compared."
        value = f"{score.metric} on rows {score.rows[:12]}, champion: {best.metric} on rows {best.rows[:12]}"
        raise ConfigError(what, field="promote", value=value, remedy="Evaluate both models on the same rows.")
    sign = 1 if score.is_greater_better else -1
    differences = sorted(sign * (one - other) for one, other in zip(score.resampled, best.resampled, strict=False))
    difference, count = sign * (score.value - best.value), len(differences)
    low = differences[int(LOW * count)] if count else None
    high = differences[min(count - 1, int(HIGH * count))] if count else None
    is_better = difference > 0 and low is not None and low > 0
    words = "better than" if is_better else "not clearly better than"
    interval = f"({number_words(low)} to {number_words(high)})"
    how = "its resamples are not known" if low is None else f"by {number_words(difference)} {interval}"
    reason = f"{score.metric} is {words} that of version {champion}: {how}."
    compared = partial(verdict, metric=score.metric, difference=difference, low=low, high=high, resamples=count)
    return compared(promoted=is_better, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A run's request to the registry: a version of the model `name` with a description and tags.

    `alias` is that of the best version; without a score it is set only where there is none yet. `digest` is the SHA-256
    of the run's model, and `flavor` what MLflow gets besides the reference to the weights.
    """

    name: str
    digest: str
    alias: str = CHAMPION
    description: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    score: Score | None = None
    flavor: Flavor | None = None


@dataclass(frozen=True, kw_only=True)
class Registered:
    """The outcome of a run's request to the registry, for the model with this digest.

    `value` and `best` are what the model and the champion scored in `verdict.metric`; None where nothing was compared.
    """

    name: str
    version: str
    digest: str
    verdict: Verdict
    value: float | None = None
    best: float | None = None

    @classmethod
    def of(cls, asked: Registration, version: str, verdict: Verdict) -> Registered:
        """The outcome of a registration."""
        value = best = None
        if asked.score is not None and verdict.difference is not None:
            value = asked.score.value
            best = value - (1 if asked.score.is_greater_better else -1) * verdict.difference
        return cls(name=asked.name, version=version, digest=asked.digest, verdict=verdict, value=value, best=best)


def register(client: Any, model_id: str, run_id: str, asked: Registration) -> tuple[str, Verdict]:
    """Register a model's version, unless it is there, and move the aliases; return the version and the verdict."""
    known = [row for row in versions_of(client, asked.name) if row.tags.get(DIGEST_TAG) == asked.digest]
    oldest = min((int(row.version) for row in known), default=None)
    version = _create(client, model_id, run_id, asked) if oldest is None else str(oldest)
    current = find_alias(client, asked.name, CANDIDATE)
    if current is None or int(current) < int(version):
        client.set_registered_model_alias(asked.name, CANDIDATE, version)
    decided = client.get_model_version(asked.name, version).tags.get(VERDICT_TAG)
    if decided is not None:  # what people have moved since stays
        return version, from_record(Verdict, parse_json(decided))
    try:
        verdict = promote(client, asked.name, version, alias=asked.alias)
    except ConfigError as refused:
        verdict = Verdict(promoted=False, reason=refused.message, candidate=version)
    client.set_model_version_tag(asked.name, version, VERDICT_TAG, verdict.to_json())
    return version, verdict


def promote(client: Any, name: str, version: str, *, alias: str = CHAMPION) -> Verdict:
    """Move the champion's alias to a version if that is better; return why, or why not. GoneError: no such version."""
    current = find_alias(client, name, alias)
    scores = [_score_of(client, name, contender) if contender else None for contender in (version, current)]
    verdict = compare(version, scores[0], current, scores[1])
    if verdict.promoted and current != version:
        if current is not None:  # first: a process that dies in between has changed no alias
            client.set_model_version_tag(name, version, BEFORE_TAG, current)
        client.set_registered_model_alias(name, alias, version)
    return verdict


def read_run_tags(client: Any, name: str, version: str) -> dict[str, str]:
    """The tags of a version's run; none of a version that was registered by hand. Raises GoneError."""
    run_id = client.get_model_version(name, version).run_id
    return dict(client.get_run(run_id).data.tags) if run_id else {}


def roll_back(client: Any, name: str, *, alias: str = CHAMPION) -> tuple[str, str]:
    """Give the alias back to the version that had it before; return both versions, the new one first."""
    current = find_alias(client, name, alias)
    before = None if current is None else client.get_model_version(name, current).tags.get(BEFORE_TAG)
    if current is None or before is None:
        is_first = f"Version {current} is the first {alias} of {name}."
        what = f"No version of {name} has the alias {alias}." if current is None else is_first
        remedy = "trainflow models lists the versions; trainflow promote moves the alias."
        raise ConfigError(what, field="rollback", value=name, remedy=remedy)
    client.set_registered_model_alias(name, alias, before)
    return before, current


def find_alias(client: Any, name: str, alias: str) -> str | None:
    """The version that has an alias; None if none has it, or there is no such model."""
    with contextlib.suppress(GoneError, RefusedError):
        return str(client.get_model_version_by_alias(name, alias).version)
    return None


class ModelVersion(NamedTuple):
    """One version of a registered model: the run that it came from, the tags of that run, and where its files are."""

    name: str
    version: str
    run_id: str
    source: str
    tags: dict[str, str]


def list_model_versions(client: MlflowClient) -> list[ModelVersion]:
    """Return every version in the registry. Raises what mlflow raises."""
    return [
        ModelVersion(row.name, str(row.version), row.run_id or "", row.source or "", _tags_of(client, row.run_id))
        for row in versions_of(client)
    ]


def versions_of(client: Any, name: str | None = None) -> Iterator[Any]:
    """Yield MLflow's own records of the versions of a model, or of every model. Raises what mlflow raises."""
    quoted = None if name is None else name.replace("'", "''")
    token: str | None = None
    while True:
        page = client.search_model_versions(quoted and f"name='{quoted}'", max_results=_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _tags_of(client: MlflowClient, run_id: str | None) -> dict[str, str]:
    try:
        return dict(client.get_run(run_id).data.tags) if run_id else {}
    except Exception as error:
        if getattr(error, "error_code", None) == GONE:  # a version outlives the run that it came from
            return {}
        raise


def list_versions(client: Any) -> Iterator[dict[str, Any]]:
    """Every version of every registered model: name, version, aliases, description, score, verdict, tags, run."""
    for model in client.search_registered_models(max_results=1000):
        aliases: dict[str, list[str]] = {}
        for alias, version in (model.aliases or {}).items():
            aliases.setdefault(str(version), []).append(alias)
        for record in sorted(versions_of(client, model.name), key=lambda record: -int(record.version)):
            score = record.tags.get(SCORE_TAG)
            shown = {key: value for key, value in parse_json(score).items() if key != "resampled"} if score else None
            verdict = record.tags.get(VERDICT_TAG)
            yield {
                "name": model.name,
                "version": str(record.version),
                "aliases": sorted(aliases.get(str(record.version), [])),
                "description": record.description or "",
                "score": shown,
                "verdict": parse_json(verdict) if verdict else None,
                "tags": {key: value for key, value in record.tags.items() if key not in (SCORE_TAG, VERDICT_TAG)},
                "run_id": record.run_id,
                "digest": record.tags.get(DIGEST_TAG),
            }


def _create(client: Any, model_id: str, run_id: str, asked: Registration) -> str:
    with contextlib.suppress(Exception):  # it is there, or the next request says what is wrong
        client.create_registered_model(asked.name)
    tags = {**asked.tags, DIGEST_TAG: asked.digest}
    if asked.score is not None:
        client.log_text(run_id, json.dumps(asked.score.resampled), _resamples_path(asked.name, asked.digest))
        tags[SCORE_TAG] = json.dumps(to_record(replace(asked.score, resampled=())), allow_nan=False)
    by_id, location = f"models:/{model_id}", str(client.get_logged_model(model_id).artifact_location)
    if location.startswith("mlflow-artifacts:"):
        made = _create_from(client, by_id, model_id, run_id, asked, tags)
    else:
        # Given the id, a database would look for the model in the process's default store, and create that.
        try:
            made = _create_from(client, location, model_id, run_id, asked, tags)
        except RefusedError:  # a server takes no path on its own disk
            made = _create_from(client, by_id, model_id, run_id, asked, tags)
    return str(made.version)


def _create_from(
    client: Any, source: str, model_id: str, run_id: str, asked: Registration, tags: Mapping[str, str]
) -> Any:
    text = asked.description or None
    return client.create_model_version(
        asked.name, source, run_id, dict(tags), description=text, await_creation_for=0, model_id=model_id
    )


def _score_of(client: Any, name: str, version: str) -> Score | None:
    found = client.get_model_version(name, version)
    text = found.tags.get(SCORE_TAG)
    if text is None:
        return None
    score = from_record(Score, parse_json(text))
    path = _resamples_path(name, found.tags.get(DIGEST_TAG, ""))
    return replace(score, resampled=_read_resamples(client, found.run_id, path) if found.run_id else ())


def _resamples_path(name: str, digest: str) -> str:
    return f"{_ARTIFACTS}/{name}-resamples-{digest[:16]}.json"


def _read_resamples(client: Any, run_id: str, path: str) -> tuple[float, ...]:
    """The metric on the resamples; none where the run, or its artifact, was removed."""
    try:
        sizes = {artifact.path: artifact.file_size for artifact in client.list_artifacts(run_id, _ARTIFACTS)}
        if sizes.get(path, _RESAMPLES_BYTES) >= _RESAMPLES_BYTES:
            return ()
        address = client.get_run(run_id).info.artifact_uri
        return tuple(float(value) for value in parse_json(client.read_artifact(address, path)))
    except (GoneError, RefusedError, ValueError, TypeError):
        return ()
