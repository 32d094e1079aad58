"""What MLflow's registry holds: each version of each model, and the run that it came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PAGE = 1000
_GONE = "RESOURCE_DOES_NOT_EXIST"


class ModelVersion(NamedTuple):
    """One version of a registered model: the run that it came from, the tags of that run, and where its files are."""

    name: str
    version: str
    run_id: str
    source: str
    tags: dict[str, str]


def list_model_versions(client: MlflowClient) -> list[ModelVersion]:
    """Return every version in the registry. Raises what mlflow raises."""
    found: list[ModelVersion] = []
    for each in versions_of(client):
        tags = _tags_of(client, each.run_id) if each.run_id else {}
        found.append(ModelVersion(each.name, str(each.version), each.run_id or "", each.source or "", tags))
    return found


def versions_of(client: MlflowClient, name: str | None = None) -> Iterator[Any]:
    """Yield MLflow's own records of the versions of a model, or of every model. Raises what mlflow raises."""
    quoted = None if name is None else name.replace("'", "''")
    token: str | None = None
    while True:
        page = client.search_model_versions(quoted and f"name='{quoted}'", max_results=_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _tags_of(client: MlflowClient, run_id: str) -> dict[str, str]:
    try:
        return dict(client.get_run(run_id).data.tags)
    except Exception as error:
        if getattr(error, "error_code", None) == _GONE:  # a version outlives the run that it came from
            return {}
        raise
