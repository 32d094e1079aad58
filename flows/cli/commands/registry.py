"""The commands that speak to MLflow: `trainflow models`, `promote`, `rollback` and `sync`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from trainer_lib.base.suggestions import number_words
from trainer_lib.errors import ConfigError, GateError, StorageError, StoreUnreachableError, first_line
from trainer_lib.secrets import mask
from trainer_lib.trackers.mlflow import mlflow_registry
from trainer_lib.trackers.mlflow.delivery import Delivery
from trainer_lib.trackers.mlflow.mlflow_client import Clock, GoneError, RefusedError, connect_timed, shorten
from trainer_lib.trackers.names import EVALUATE_TAG, GATE_TAG
from trainer_lib.trackers.spool import Waiting, count_waiting
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Answer, BareForm, Chosen, Form, PlaceWords, StorageUrl, command, find_storage
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.spec.spec import PipelineSpec
from trainflow.tasks.tracking.mlflow_run import spool_dirs, tracking_uri

_SAY_EVERY_S = 10.0
_LOOK_EVERY_S = 0.2  # while another process delivers

Spec = Annotated[
    Path | None,
    typer.Option("--spec", metavar="SPEC", help="A spec; unset: what is in this folder.", show_default=False),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The registered model.", show_default=False)]
Alias = Annotated[str, typer.Option(metavar="ALIAS", help="The alias that moves.")]


@command("""
    trainflow models
    trainflow models pipeline.yaml --json
""")
def models(form: BareForm, place: PlaceWords) -> Answer:
    """List the registered models: versions, aliases, scores, and why the champion moved or did not."""
    with _registry(place.choose("models"), "models") as client:
        versions = list(mlflow_registry.list_versions(client))
    lines = [line for version in versions for line in _lines(version)]
    if not versions and not form.quiet:
        lines = [Text("No model is registered. Set register.name in the spec.")]
    return Answer({"versions": versions}, lambda: lines)


@command("""
    trainflow promote digits 4
    trainflow promote digits/4
""")
def promote(
    form: Form,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The registered model, or NAME/VERSION.")],
    version: Annotated[
        str | None, typer.Argument(metavar="VERSION", help="The version, a number.", show_default=False)
    ] = None,
    alias: Alias = mlflow_registry.CHAMPION,
    ignore_gates: Annotated[
        bool, typer.Option("--ignore-gates", help="Promote a version that misses evaluate.require, too.")
    ] = False,
    spec: Spec = None,
    storage: StorageUrl = None,
) -> Answer:
    """Make a version the champion, if it meets evaluate.require and is better on the same rows.

    Exit code 21 if it misses a requirement, 2 if it is not better.
    """
    # The registry takes no name with a slash.
    name, _, number = name.partition("/")
    version = version or number
    if not version:
        remedy = f"Write trainflow promote {name}/VERSION; trainflow models lists the versions."
        raise ConfigError("The version is missing.", field="VERSION", remedy=remedy)
    chosen = find_storage(spec, None, storage, command="promote")
    with _registry(chosen, "promote") as client:
        if not ignore_gates:
            _require_gates(client, name, version, chosen.spec)
        verdict = mlflow_registry.promote(client, name, version, alias=alias)
    if not verdict.promoted:
        what = f"Version {version} does not become {alias}: {verdict.reason}"
        remedy = "Train a better model, or set the alias in MLflow by hand."
        raise ConfigError(what, field="promote", value=f"{name}/{version}", remedy=remedy)
    line = Text(f"{name} version {version} is {alias}. {verdict.reason}", "green")
    return Answer({"name": name, "alias": alias, "verdict": vars(verdict)}, lambda: [line])


@command("trainflow rollback digits")
def rollback(
    form: Form, name: Name, alias: Alias = mlflow_registry.CHAMPION, spec: Spec = None, storage: StorageUrl = None
) -> Answer:
    """Give the champion's alias back to the version that had it before."""
    with _registry(find_storage(spec, None, storage, command="rollback"), "rollback") as client:
        now, before = mlflow_registry.roll_back(client, name, alias=alias)
    line = Text(f"{name} version {now} is {alias} again; it was version {before}.", "green")
    return Answer({"name": name, "alias": alias, "version": now, "was": before}, lambda: [line])


def _require_gates(client: Any, name: str, version: str, spec: PipelineSpec | None) -> None:
    """Raises GateError for a version that misses what its spec requires; without its spec its run's record counts."""
    from trainflow.tasks.stage.gates import judge
    from trainflow.tasks.stage.manifest import look_up_in

    tags = mlflow_registry.read_run_tags(client, name, version)
    key, recorded = tags.get(EVALUATE_TAG), tags.get(GATE_TAG)
    evaluation = None if spec is None or key is None else look_up_in(spec.storage, "evaluate", key)
    try:
        # Another pipeline's requirements say nothing about this model.
        if spec is not None and spec.register.name == name and (evaluation is not None or recorded is None):
            judge(spec.evaluate, evaluation).enforce("promoted")
        elif recorded is not None and recorded.startswith("failed"):
            what = f"The model is not promoted: its run recorded that the gates {recorded}."
            raise GateError(what, field="promote", value=f"{name} {version}", remedy="Train a better model.")
    except GateError as error:
        error.remedy = f"{error.remedy} --ignore-gates promotes this one all the same."
        raise


@contextlib.contextmanager
def _registry(chosen: Chosen, name: str) -> Iterator[Any]:
    """A client of the registry; its failures get a type, and the name of the command."""
    uri = tracking_uri(chosen.tracking, chosen.place)
    try:
        yield connect_timed(uri, Clock())
    except (GoneError, RefusedError) as error:
        what = f"The registry does not have this: {first_line(error.__cause__ or error)}."
        remedy = "trainflow models lists the models, their versions and aliases."
        raise ConfigError(what, field=name, value=mask(uri), remedy=remedy) from error
    except (ConfigError, GateError, typer.Exit):
        raise
    except Exception as error:  # whatever mlflow raises
        what = f"The registry does not answer: {shorten(error)}."
        remedy = "Nothing was changed. Run the same command again when it answers."
        raise StoreUnreachableError(what, field=name, value=mask(uri), remedy=remedy) from error


def _lines(version: dict[str, Any]) -> Iterator[Text]:
    aliases = f"  [{', '.join(version['aliases'])}]" if version["aliases"] else ""
    score = version["score"]
    measured = f"  {score['metric']} {number_words(score['value'], 6)}" if score else ""
    style = "green" if mlflow_registry.CHAMPION in version["aliases"] else ""
    yield Text(f"{version['name']} {version['version']}{aliases}{measured}", style)
    if version["verdict"]:
        yield Text(f"  {version['verdict']['reason']}", "dim")


@command("""
    trainflow sync pipeline.yaml
    trainflow sync --storage s3://bucket/project
""")
def sync(
    form: Form,
    place: PlaceWords,
    drop: Annotated[
        bool, typer.Option("--drop", help="Remove what waits for another server than this one: a wrong address.")
    ] = False,
) -> Answer:
    """Deliver to MLflow what waits on this machine because the server was out of reach. Runs nothing.

    --storage may be the output_dir of a Trainer.
    """
    chosen = place.choose("sync")
    uri = tracking_uri(chosen.tracking, chosen.place)
    out = terminal.console(stderr=True, quiet=form.quiet)
    delivered: list[str] = []
    with stoppable(out.print, remedy="The same command delivers the rest."):
        for root in spool_dirs(chosen.place):
            if drop and count_waiting(root) is not None:
                Delivery(root, uri).drop_foreign()
            if (waiting := count_waiting(root)) is not None:
                _deliver(root, uri, out)
                delivered.append(str(waiting))
    text = f"MLflow has everything: {', '.join(delivered)} delivered." if delivered else "Nothing waits."
    return Answer({"delivered": delivered}, lambda: [Text(text)])


def _deliver(root: Path, uri: str, out: Console) -> None:
    """Deliver one spool; say every ten seconds what still waits. Raises StorageError if the server does not take it."""
    delivery = Delivery(root, uri)
    failures: list[Exception] = []

    def work() -> None:
        try:
            while not delivery.deliver() and delivery.is_elsewhere:
                time.sleep(_LOOK_EVERY_S)
        except Exception as error:  # whatever mlflow raises
            failures.append(error)

    thread = threading.Thread(target=work, name="sync", daemon=True)  # Ctrl-C does not wait for a request
    thread.start()
    while thread.is_alive():
        out.print(f"{waiting} -> {_servers(waiting, uri)}" if (waiting := count_waiting(root)) else "")
        thread.join(_SAY_EVERY_S)
    waiting = count_waiting(root)
    if waiting is None and not failures:
        return
    reason = shorten(failures[0]) if failures else delivery.obstacle or "its server did not take it."
    raise StorageError(
        f"{waiting} still waits for MLflow in {root}: {reason}",
        field="tracking",
        value=_servers(waiting, uri),
        remedy="Run the same command again when the server answers. Was its address wrong? Correct tracking.uri, and "
        "remove what waits for the other one: trainflow sync --drop.",
    )


def _servers(waiting: Waiting | None, uri: str) -> str:
    """The servers that a spool waits for, which may be others than that of the spec by now."""
    return mask(", ".join(waiting.servers) if waiting is not None and waiting.servers else uri)
