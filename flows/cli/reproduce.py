"""The command `trainflow reproduce`: a recorded run once more, compared with what it left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from flows.cli import terminal
from flows.cli.chain import Address, StorageUrl, find
from flows.cli.options import Debug, Json, Quiet, print_json
from flows.cli.presentation import shown
from flows.cli.signals import stoppable
from flows.server.api import quiet_environment
from trainer_lib.errors import ConfigError, NotReproducibleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flows.reproduction import Outcome


def reproduce(
    address: Address,
    storage: StorageUrl = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An empty storage for the second run, which stays; unset: a temporary one."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="R",
            help="Compare numbers up to this relative difference; unset: bytes on a CPU, else 1e-3.",
        ),
    ] = None,
    other_data: Annotated[
        bool, typer.Option("--other-data", help="Go on although the data is not that of the run.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a recorded run again, and compare weights, predictions and metrics. Exit code 20 if they differ.

    What differs in versions, settings and recipe is named before it begins. MLflow and hubs are left alone.
    """
    quiet_environment()
    if tolerance is not None and not tolerance < 1:
        raise ConfigError(
            "The tolerance is a relative difference, less than 1.", field="--tolerance", value=tolerance, remedy="1e-3."
        )
    chain, _ = find(address, storage, lenient=False)
    from flows.cli.execution import engine, run_and_show
    from flows.reproduction import Question, Reproduction, open_scratch

    out = terminal.console(stderr=as_json, quiet=quiet)
    run = chain.address if chain.run is None else chain.run.id
    with stoppable(out.print, remedy="Nothing of the run was changed; run it again."), open_scratch(to, run) as place:
        asked = Question(to=place, tolerance=tolerance, other_data=other_data)
        job = Reproduction(chain, asked, lambda text: out.print(Text(text)))
        with engine(out):
            outcome = job.carry_out(lambda spec, **choice: run_and_show(spec, out, debug=debug, **choice))
    if as_json:
        same = outcome.verdict != "different"
        code = 0 if same else NotReproducibleError.exit_code
        print_json({"ok": same, "exit_code": code, **outcome.to_dict()})
        raise typer.Exit(code)
    if not quiet or outcome.verdict == "different":
        terminal.show(list(_lines(outcome, kept=to is not None)))
    outcome.require_same()


def _lines(outcome: Outcome, *, kept: bool) -> Iterator[Text]:
    same = sum(each["then"] == each["now"] for each in outcome.compared)
    yield Text(outcome.verdict, "bold red" if outcome.verdict == "different" else "green")
    yield Text(f"  files    {same} of {len(outcome.compared)} have the same bytes")
    if outcome.largest is not None:
        compared = "bytes are compared" if outcome.tolerance is None else f"tolerance {outcome.tolerance:g}"
        yield Text(f"  numbers  largest relative difference {outcome.largest:.2g} ({compared}, on {outcome.device})")
    yield Text(f"  metrics  {f'{len(outcome.metrics)} differ' if outcome.metrics else 'the same'}")
    for sentence in outcome.differences:
        yield Text(f"  differs  {sentence}")
    if kept:
        yield Text(f"  where    {shown(outcome.to)}")
