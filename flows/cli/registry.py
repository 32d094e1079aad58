"""The commands `trainflow models`, `promote` and `rollback`: MLflow's registry, and which version is champion."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from trainer_lib.errors import ConfigError, GateError, StoreUnreachableError, first_line
from trainer_lib.secrets import mask
from trainer_lib.trackers import mlflow_registry
from trainer_lib.trackers.mlflow_client import GoneError, RefusedError, connect_timed
from trainer_lib.trackers.names import EVALUATE_TAG, GATE_TAG
from trainer_lib.trackers.shipper import Clock, shorten
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Bare, Debug, Json, Overrides, Quiet, print_json
from trainflow.flows.cli.spec_choice import choose_spec_or_storage
from trainflow.flows.cli.ui import find_storage
from trainflow.flows.server.api import quiet_environment
from trainflow.flows.spec.spec import load_spec
from trainflow.tasks.tracking.mlflow_run import tracking_uri

Spec = Annotated[
    Path | None,
    typer.Option("--spec", metavar="SPEC", help="A spec; unset: what is in this folder.", show_default=False),
]
Storage = Annotated[str | None, typer.Option(metavar="URL", help="A storage root, instead of a spec.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The registered model.", show_default=False)]
Alias = Annotated[str, typer.Option(metavar="ALIAS", help="The alias that moves.")]


def models(
    spec: Annotated[Path | None, typer.Argument(help="A spec; unset: what is in this folder.")] = None,
    overrides: Overrides = None,
    storage: Storage = None,
    bare: Bare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the registered models: versions, aliases, scores, and why the champion moved or did not."""
    with _registry(spec, overrides, storage, "models") as client:
        found = list(mlflow_registry.list_versions(client))
    if as_json:
        print_json({"ok": True, "exit_code": 0, "versions": found})
        return
    lines = [line for each in found for line in _lines(each)]
    terminal.show(lines or ([] if bare else [Text("No model is registered. Set register.name in the spec.")]))


def promote(
    name: Name,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="The version, a number.", show_default=False)],
    alias: Alias = mlflow_registry.CHAMPION,
    ignore_gates: Annotated[
        bool, typer.Option("--ignore-gates", help="Promote a version that misses evaluate.require, too.")
    ] = False,
    spec: Spec = None,
    storage: Storage = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a version the champion, if it meets evaluate.require and is better on the same rows.

    Exit code 21 if it misses a requirement, 2 if it is not better.
    """
    with _registry(spec, None, storage, "promote") as client:
        if not ignore_gates:
            _require_gates(client, name, version, spec, storage)
        verdict = mlflow_registry.promote(client, name, version, alias=alias)
    if not verdict.promoted:
        raise ConfigError(
            f"Version {version} does not become {alias}: {verdict.reason}",
            field="promote",
            value=name,
            remedy="Train a better model, or set the alias in MLflow by hand.",
        )
    if as_json:
        print_json({"ok": True, "exit_code": 0, "name": name, "alias": alias, "verdict": verdict.__dict__})
    elif not quiet:
        terminal.show([Text(f"{name} version {version} is {alias}. {verdict.reason}", "green")])


def rollback(
    name: Name,
    alias: Alias = mlflow_registry.CHAMPION,
    spec: Spec = None,
    storage: Storage = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Give the champion's alias back to the version that had it before."""
    with _registry(spec, None, storage, "rollback") as client:
        now, before = mlflow_registry.roll_back(client, name, alias=alias)
    if as_json:
        print_json({"ok": True, "exit_code": 0, "name": name, "alias": alias, "version": now, "was": before})
    elif not quiet:
        terminal.show([Text(f"{name} version {now} is {alias} again; it was version {before}.", "green")])


def _require_gates(client: Any, name: str, version: str, spec: Path | None, storage: str | None) -> None:
    """Raises GateError for a version that misses what its spec requires; without its spec its run's record counts."""
    from trainflow.tasks.stage.gates import judge
    from trainflow.tasks.stage.manifest import look_up_in

    tags = mlflow_registry.read_run_tags(client, name, version)
    chosen, words, _ = choose_spec_or_storage(spec, None, storage)
    parsed = None if chosen is None else load_spec(chosen, words, needs_sweep=False)
    key, recorded = tags.get(EVALUATE_TAG), tags.get(GATE_TAG)
    evaluation = None if parsed is None or key is None else look_up_in(parsed.storage, "evaluate", key)
    try:
        # Another pipeline's requirements say nothing about this model.
        if parsed is not None and parsed.register.name == name and (evaluation is not None or recorded is None):
            judge(parsed.evaluate, evaluation).enforce("promoted")
        elif recorded is not None and recorded.startswith("failed"):
            raise GateError(
                f"The model is not promoted: its run recorded that the gates {recorded}.",
                field="promote",
                value=f"{name} {version}",
                remedy="Train a better model.",
            )
    except GateError as error:
        error.remedy = f"{error.remedy} --ignore-gates promotes this one all the same."
        raise


@contextlib.contextmanager
def _registry(spec: Path | None, overrides: list[str] | None, storage: str | None, command: str) -> Iterator[Any]:
    """A client of the registry; its failures get a type."""
    quiet_environment()
    config, place = find_storage(spec, overrides or [], storage, command=command)
    uri = tracking_uri(config, place)
    try:
        yield connect_timed(uri, Clock())
    except (GoneError, RefusedError) as error:
        raise ConfigError(
            f"The registry does not have this: {first_line(error.__cause__ or error)}.",
            field=command,
            value=mask(uri),
            remedy="trainflow models lists the models, their versions and aliases.",
        ) from error
    except (ConfigError, GateError, typer.Exit):
        raise
    except Exception as error:  # whatever mlflow raises
        raise StoreUnreachableError(
            f"The registry does not answer: {shorten(error)}.",
            field=command,
            value=mask(uri),
            remedy="Nothing was changed. Run the same command again when it answers.",
        ) from error


def _lines(version: dict[str, Any]) -> Iterator[Text]:
    aliases = f"  [{', '.join(version['aliases'])}]" if version["aliases"] else ""
    score = version["score"]
    measured = f"  {score['metric']} {score['value']:.6g}" if score else ""
    style = "green" if mlflow_registry.CHAMPION in version["aliases"] else ""
    yield Text(f"{version['name']} {version['version']}{aliases}{measured}", style)
    if version["verdict"]:
        yield Text(f"  {version['verdict']['reason']}", "dim")
