"""Work pools: the kinds that a pipeline is deployed to, and the variables of a run's process, container or pod."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from trainer_lib.base.suggestions import nearest, suggestion
from trainer_lib.errors import ConfigError
from trainflow.flows.spec.spec_file import parse_override_value

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

PoolType = Literal["process", "docker", "kubernetes"]
TYPES: tuple[PoolType, ...] = ("process", "docker", "kubernetes")
IN_CONTAINERS = ("docker", "kubernetes")
# The worker's own package, where it is not part of Prefect.
_PACKAGES = {"docker": "prefect-docker", "kubernetes": "prefect-kubernetes"}


def require_type(text: str) -> PoolType:
    """The kind of work pool that `text` names.

    Raises:
        ConfigError: there is no such kind.
    """
    for known in TYPES:
        if text == known:
            return known
    raise ConfigError(
        "trainflow does not deploy to work pools of this type.",
        field="--pool-type",
        value=text,
        remedy=suggestion(text, TYPES),
    )


def require_pool(client: SyncPrefectClient, name: str, wanted: PoolType | None, *, create: bool) -> tuple[str, Any]:
    """The type and the base job template of a work pool, which is created if that is asked for.

    Raises:
        ConfigError: the pool is absent, or of another type than was asked for, or of one that is not known here.
    """
    from prefect.exceptions import ObjectNotFound

    try:
        found = client.read_work_pool(name)
    except ObjectNotFound as error:
        if not create:
            raise _absent(client, name, wanted or "process") from error
        return wanted or "process", _create(client, name, wanted or "process")
    if found.type not in TYPES:
        raise ConfigError(
            f"This work pool is of type {found.type}; trainflow deploys to pools of type {', '.join(TYPES)}.",
            field="--pool",
            value=name,
            remedy="Name another one: prefect work-pool create --type process NAME",
        )
    if wanted is not None and found.type != wanted:
        raise ConfigError(
            f"This work pool is of type {found.type}, not {wanted}.",
            field="--pool-type",
            value=wanted,
            remedy=f"Leave --pool-type out, or name another pool: prefect work-pool create --type {wanted} NAME",
        )
    return found.type, found.base_job_template


def read_variables(
    given: Sequence[str], image: str | None, pool_type: str, template: Mapping[str, Any], env: Mapping[str, str]
) -> dict[str, Any]:
    """The job variables of a deployment, from ``--job-variable NAME=VALUE`` and ``--image``.

    Args:
        template: the pool's base job template, which says what variables there are.
        env: variables of the run's environment that the deployment needs.

    Raises:
        ConfigError: the pool has no such variable, or an image is missing or has no meaning.
    """
    known = template.get("variables", {}).get("properties", {})
    found = dict(_read_variable(text, known) for text in given)
    if image is not None:
        if pool_type not in IN_CONTAINERS:
            raise ConfigError(
                "A pool of processes starts no container.",
                field="--image",
                value=image,
                remedy="Leave --image out, or name a pool of type docker or kubernetes.",
            )
        found["image"] = image
    if pool_type in IN_CONTAINERS and not found.get("image"):
        raise ConfigError(
            "The run needs an image with trainflow and the project in it.",
            field="--image",
            remedy="Build one from deployments/Dockerfile, and name it: --image registry.example/digits:1",
        )
    own = found.get("env") if isinstance(found.get("env"), dict) else {}
    return {**found, "env": {**(own or {}), **env}}


def _read_variable(text: str, known: Mapping[str, Any]) -> tuple[str, Any]:
    """The name and the value in ``NAME=VALUE``; where the pool says what it knows, one of its variables."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(
            "A job variable has the form NAME=VALUE.",
            field="--job-variable",
            value=text,
            remedy="Write for example --job-variable image_pull_policy=Always.",
        )
    if known and name not in known:
        raise ConfigError(
            "The work pool has no such variable.",
            field="--job-variable",
            value=name,
            remedy=suggestion(name, sorted(known)),
        )
    try:
        return name, parse_override_value(value)
    except ValueError as error:
        raise ConfigError(
            f"This is not a value: {error}.", field="--job-variable", value=text, remedy="Quote it for the shell."
        ) from error


def start_command(name: str, pool_type: str) -> str:
    """The command that starts a worker of the pool."""
    package = _PACKAGES.get(pool_type)
    worker = f"prefect worker start --pool {name}"
    return worker if package is None else f"{worker} --type {pool_type}   # needs pip install {package}"


def _absent(client: SyncPrefectClient, name: str, pool_type: str) -> ConfigError:
    from prefect.client.schemas.filters import WorkPoolFilter

    near = nearest(name, [pool.name for pool in client.read_work_pools(work_pool_filter=WorkPoolFilter())])
    remedy = f"Add --create-pool, or: prefect work-pool create --type {pool_type} {name}"
    return ConfigError(
        "This work pool does not exist.",
        field="--pool",
        value=name,
        remedy=f"Did you mean '{near}'? Else: {remedy[0].lower()}{remedy[1:]}" if near else remedy,
    )


def _create(client: SyncPrefectClient, name: str, pool_type: str) -> Any:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

    template = asyncio.run(get_default_base_job_template_for_infrastructure_type(pool_type))
    if template is None:
        package = _PACKAGES[pool_type]
        raise ConfigError(
            f"The server does not know what a job of a {pool_type} pool looks like.",
            field="--pool-type",
            value=pool_type,
            remedy=f"Install {package} here, and run this command again.",
        )
    client.create_work_pool(WorkPoolCreate(name=name, type=pool_type, base_job_template=template))
    return template
