"""The command `trainflow follow`: the checkpoints of a training, evaluated beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from trainer_lib.secrets import mask
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Debug, Json, Overrides, Quiet, Spec, print_json
from trainflow.flows.cli.presentation import same_command
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.cli.spec_choice import choose_spec_file
from trainflow.flows.server.api import quiet_environment
from trainflow.flows.server.schedule import read_interval

if TYPE_CHECKING:
    from trainflow.flows.follow.following import Followed
    from trainflow.tasks.follow.evaluations import Evaluation
    from trainflow.tasks.follow.follower import Listener


def follow(
    spec: Spec = None,
    overrides: Overrides = None,
    once: Annotated[bool, typer.Option("--once", help="Evaluate the checkpoints that are there, and end.")] = False,
    every: Annotated[str, typer.Option(help="Time between two looks at the storage: 10 (seconds), 5m.")] = "10",
    cpu: Annotated[bool, typer.Option("--cpu", help="Evaluate on the CPU.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate each checkpoint of a training beside it, until it has ended, and keep the best from its rotation.

    Several may share the work. After an interruption or a kill the same command continues, and none is evaluated twice.
    """
    quiet_environment()
    every_s = read_interval(every, option="--every", least_s=0.1) or 0.0
    from trainflow.flows.follow.following import follow_training
    from trainflow.flows.spec.spec import load_spec
    from trainflow.tasks.keys.resolver import Resolver

    out = terminal.console(stderr=as_json, quiet=quiet)
    again = same_command()
    with stoppable(out.print, remedy=f"The same command continues: {again}"):
        parsed = load_spec(*choose_spec_file(spec, overrides), Resolver(), needs_sweep=False)
        with terminal.progress(out, plain=True) as display, terminal.logs(display, debug=debug):
            done = follow_training(
                parsed,
                _listener(out),
                once=once,
                every_s=every_s,
                use_cpu=cpu,
                debug=debug,
            )
    if as_json:
        print_json({"ok": True, "exit_code": 0, **done.to_dict()})
    elif not quiet:
        terminal.show(_summary(done))


def _listener(out: Console) -> Listener:
    """Shows what a follower reports; the warnings that the workers of every checkpoint print, once."""
    from trainflow.tasks.follow.follower import Listener
    from trainflow.tasks.stage.progress import duration, measured

    lines: set[str] = set()

    def once_each(line: str) -> None:
        if line not in lines:
            lines.add(line)
            out.print(mask(line), style="dim")

    def evaluated(found: Evaluation, is_best: bool) -> None:
        text = measured({"step": found.step, "logs": found.metrics})
        out.print(f"{text} ({duration(found.seconds)}){', the best so far' if is_best else ''}")

    return Listener(out.print, once_each, evaluated)


def _summary(done: Followed) -> list[Text]:
    from trainflow.flows.follow.following import describe_number

    if done.run_id is None:
        return [Text(f"{done.sentence} Nothing is evaluated.")]
    text = f"{done.sentence} {describe_number(len(done.evaluations))}, {done.count} by this command."
    lines = [Text(text, "green")]
    if done.best is not None:
        lines.append(Text(f"  best     step {done.best.step} ({done.best.checkpoint}), kept from rotation"))
    if done.waiting is not None:
        lines.append(Text(f"  waiting  {done.waiting}: trainflow sync delivers it to MLflow"))
    return lines
