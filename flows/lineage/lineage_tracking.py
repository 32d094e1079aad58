"""The links of a lineage in MLflow: the run that has the stages' keys as tags, and the registered versions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_lib.errors import ConfigError, InfrastructureError, StorageError, StoreUnreachableError
from trainer_lib.model_folder.locate import find_model
from trainer_lib.secrets import mask
from trainer_lib.trackers.mlflow_client import TOKEN_TAG, GoneError, connect_timed
from trainer_lib.trackers.mlflow_registry import list_versions
from trainer_lib.trackers.model_record import DIGEST_TAG
from trainer_lib.trackers.shipper import Clock, shorten
from trainflow.flows.lineage.lineage_chain import Chain
from trainflow.tasks.configs import TrackingConfig
from trainflow.tasks.tracking.mlflow_run import find_run_id, tracking_uri

_TAG = "trainflow."
_SHORT = 16
"""Characters of a key that a run's tag has."""
_SQLITE = "sqlite:///"


@dataclass(frozen=True)
class TrackedLinks:
    """What MLflow has of a chain.

    Attributes:
        uri: its address, without credentials.
        run_id: of the run.
        tags: of the run.
        versions: of registered models: name, version, aliases, and the tags that trainflow gave it.
        digest: under which the registry has the model of the chain; None where its run does not describe it.
    """

    uri: str
    run_id: str
    tags: Mapping[str, str]
    versions: tuple[Mapping[str, Any], ...] = ()
    digest: str | None = None


def find_tracked(chain: Chain, config: TrackingConfig) -> TrackedLinks:
    """Ask the tracking server that this machine uses for the run of a chain.

    Raises:
        ConfigError: there is nothing to ask: no server is known, or it does not have the run.
        StoreUnreachableError: it does not answer.
    """
    lineage = chain.lineage
    if lineage.mlflow_run_id is None and lineage.tracked_run is None:
        raise ConfigError("The run was not tracked.")
    uri = tracking_uri(config, chain.storage) if chain.storage is not None else os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        raise ConfigError("No tracking server is known here; MLFLOW_TRACKING_URI names one.")
    if uri.startswith(_SQLITE) and not Path(uri.removeprefix(_SQLITE)).is_file():
        raise ConfigError("The database of MLflow is not on this machine.")
    try:
        client: Any = connect_timed(uri, Clock())
        run = _find_run(client, chain)
        if run is None:
            raise ConfigError(f"The tracking server {mask(uri)} does not have the run.")
        digest = _model_digest(chain)
        versions = tuple(_versions(client, digest, run))
        return TrackedLinks(mask(uri), run.info.run_id, dict(run.data.tags), versions, digest)
    except ConfigError:
        raise
    except Exception as error:  # whatever mlflow raises
        raise StoreUnreachableError(
            f"The tracking server does not answer: {shorten(error)}.", field="tracking", value=mask(uri)
        ) from error


def find_tracked_problems(chain: Chain, found: TrackedLinks) -> Iterator[tuple[str, str]]:
    """What differs between a chain and what MLflow has, as (link, sentence)."""
    for link in chain.lineage.stages:
        tag = found.tags.get(f"{_TAG}{link.stage}")
        if tag is not None and tag != link.key[:_SHORT]:
            yield "MLflow run", f"tag {_TAG}{link.stage}: {tag}, the lineage has {link.key[:_SHORT]}"
    published = chain.lineage.publication
    tag = found.tags.get("trainflow.published_digest")
    if published is not None and tag is not None and tag != published.content_digest:
        yield "MLflow run", f"tag trainflow.published_digest: {tag[:12]}…, published {published.content_digest[:12]}…"
    digest = found.digest
    for version in found.versions:
        name = f"{version['name']} version {version['version']}"
        if digest is not None and version["tags"].get(DIGEST_TAG) != digest:
            yield name, f"tag {DIGEST_TAG}: {version['tags'].get(DIGEST_TAG)}, the model has {digest}"
        for link in chain.lineage.stages:
            tag = version["tags"].get(f"{_TAG}{link.stage}")
            if tag is not None and tag != link.key:
                yield name, f"tag {_TAG}{link.stage}: {tag[:_SHORT]}, the lineage has {link.key[:_SHORT]}"


def _find_run(client: Any, chain: Chain) -> Any:
    lineage = chain.lineage
    run_id = lineage.mlflow_run_id
    if run_id is None and chain.storage is not None:
        run_id = find_run_id(chain.storage, lineage.tracked_run)
    if run_id is not None:
        with contextlib.suppress(GoneError):
            return client.get_run(run_id)
        return None
    experiments = [each.experiment_id for each in client.search_experiments()]
    query = f"tags.`{TOKEN_TAG}` = '{lineage.tracked_run}'"
    found = client.search_runs(experiments, query, max_results=1)
    return found[0] if found else None


def _versions(client: Any, digest: str | None, run: Any) -> Iterator[dict[str, Any]]:
    """The versions that the run registered, and those of the same model."""
    for each in list_versions(client):
        if each["run_id"] == run.info.run_id or (digest is not None and each["digest"] == digest):
            shown = {key: value for key, value in each["tags"].items() if key.startswith(_TAG)}
            yield {"name": each["name"], "version": each["version"], "aliases": each["aliases"], "tags": shown}


def _model_digest(chain: Chain) -> str | None:
    """The digest under which the registry has the model; None where the run does not describe it."""
    folder = chain.run_folder or chain.publication
    if folder is None:
        return None
    try:
        return find_model(folder.url).digest()
    except (ConfigError, StorageError, InfrastructureError):
        return None
