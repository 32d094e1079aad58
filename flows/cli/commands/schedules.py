"""Commands around runs: a new project, runs on a schedule or on new data, the checkpoints of a running training."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from trainer_lib.errors import ConfigError
from trainer_lib.protocol.recipe_names import ABOUT
from trainer_lib.secrets import mask
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Answer, Debug, Form, Quiet, SpecWords, command, complete_recipe
from trainflow.flows.cli.presentation import same_command
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.server.schedule import Schedule, read_interval

if TYPE_CHECKING:
    from trainflow.flows.following import Followed
    from trainflow.tasks.follow import Evaluation, Listener


@command("""
    trainflow init wine
    trainflow init reviews --recipe text-classification
    trainflow init churn --from customers.csv --label churned
""")
def init(
    form: Form,
    name: Annotated[Path, typer.Argument(metavar="NAME", help="A new folder; its name is the pipeline's.")],
    recipe: Annotated[
        str, typer.Option(help=f"One of trainflow's own recipes: {', '.join(ABOUT)}.", autocompletion=complete_recipe)
    ] = "tabular-classification",
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE", help="A table of yours: the spec has guesses about its columns."),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="With --from: the column to predict; default: a guess.")
    ] = None,
) -> Answer:
    """Write a new project: a spec, small real data, a test and a README, ready to run offline."""
    from trainflow.flows.new_project.starting import write_project, write_project_for

    if label is not None and source is None:
        raise ConfigError("The column is of a file.", field="--label", value=label, remedy="Give --from as well.")
    made = write_project(name, recipe) if source is None else write_project_for(name, source, label)
    files = [str(file) for file in made]
    following = f"trainflow run {shlex.quote(files[0])}"
    record = {"spec": files[0], "files": files, "next": following}
    look = [] if source is None else [f"  Look at the guesses in {files[0]}, which say why."]
    return Answer(record, lambda: map(Text, [*(f"  {file}" for file in files), "", *look, f"  next: {following}"]))


@command("trainflow schema")
def schema(debug: Debug = False) -> None:
    """Print the JSON schema of a spec, by which editors complete and check it.

    In the spec's first line: # yaml-language-server: $schema=schema.json
    """
    from trainflow.flows.spec.schema import spec_schema

    typer.echo(json.dumps(spec_schema(), indent=1))


@dataclass(frozen=True)
class Starts:
    """Options of a deployment: its name, and what starts its runs."""

    cron: Annotated[str | None, typer.Option(help='A schedule in cron\'s notation: "0 3 * * *" is daily at three.')] = (
        None
    )
    interval: Annotated[
        str | None, typer.Option(help="Time from one scheduled run to the next: 3600 (seconds), 12h, 1d.")
    ] = None
    rrule: Annotated[
        str | None, typer.Option("--rrule", help='A recurrence rule: "FREQ=WEEKLY;BYDAY=MO;BYHOUR=3".')
    ] = None
    timezone: Annotated[
        str | None, typer.Option(help="Time zone of --cron and --rrule (Europe/Berlin); UTC if unset.")
    ] = None
    retry_crashed: Annotated[
        int, typer.Option("--retry-crashed", min=0, max=100, help="How often a run that crashed runs again.")
    ] = 0
    name: Annotated[str | None, typer.Option(help="Name of the deployment; the pipeline's name if unset.")] = None

    def schedule(self) -> Schedule:
        """The schedule, if it has one."""
        interval_s = read_interval(self.interval)
        return Schedule(cron=self.cron, interval_s=interval_s, timezone=self.timezone, rrule=self.rrule)


@command("""
    trainflow serve pipeline.yaml --cron "0 3 * * *" --timezone Europe/Berlin
    trainflow serve pipeline.yaml --watch s3://bucket/scans --watch-every 5m
""")
def serve(
    words: SpecWords,
    starts: Starts,
    watch: Annotated[
        str | None, typer.Option("--watch", metavar="URL", help="Folder or URL: new data under it starts a run.")
    ] = None,
    watch_every: Annotated[
        str, typer.Option("--watch-every", help="Time between two looks at --watch: 60 (seconds), 5m.")
    ] = "60",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a pipeline on a schedule or on new data, in this process, on this machine, until Ctrl-C."""
    schedule = starts.schedule()
    every_s = read_interval(watch_every, option="--watch-every") or 0.0
    pipeline = words.load()
    # After the spec is read: a mistake in it is shown before Prefect is imported.
    from trainflow.flows.server import serving

    serving.serve(
        pipeline,
        schedule,
        name=starts.name,
        say=terminal.console(quiet=quiet).print,
        watch=watch,
        watch_every_s=every_s,
        retry_crashed=starts.retry_crashed,
    )


@command('trainflow deploy pipeline.yaml --pool gpus --cron "0 3 * * *"')
def deploy(
    form: Form,
    words: SpecWords,
    starts: Starts,
    pool: Annotated[str, typer.Option(metavar="NAME", help="The work pool that runs it.")],
    image: Annotated[str | None, typer.Option(help="Image of the runs, for pools of docker and kubernetes.")] = None,
    job_variable: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the pool's jobs; repeatable.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit-runs", min=1, help="Runs of it at once; the others wait.")
    ] = None,
) -> Answer:
    """Register a pipeline with a work pool of a Prefect server, with or without a schedule."""
    schedule = starts.schedule()
    pipeline = words.load()
    from trainflow.flows.server import serving

    deployed = serving.deploy(
        pipeline,
        schedule,
        name=starts.name,
        pool=pool,
        image=image,
        job_variables=job_variable or (),
        limit=limit,
        retry_crashed=starts.retry_crashed,
    )
    return Answer(vars(deployed), deployed.lines)


@command("trainflow follow pipeline.yaml")
def follow(
    form: Form,
    words: SpecWords,
    once: Annotated[bool, typer.Option("--once", help="Evaluate the checkpoints that are there, and end.")] = False,
    every: Annotated[str, typer.Option(help="Time between two looks at the storage: 10 (seconds), 5m.")] = "10",
    cpu: Annotated[bool, typer.Option("--cpu", help="Evaluate on the CPU.")] = False,
) -> Answer:
    """Evaluate each checkpoint of a training alongside it, until it has ended, and keep the best from its rotation.

    Several may share the work. After an interruption or a kill the same command continues, and none is evaluated twice.
    """
    every_s = read_interval(every, option="--every", least_s=0.1) or 0.0
    from trainflow.flows.following import follow_training
    from trainflow.tasks.keys.resolver import Resolver

    out = form.console()
    with stoppable(out.print, remedy=f"The same command continues: {same_command()}"):
        parsed = words.load(Resolver())
        with terminal.progress(out, plain=True) as display, terminal.logs(display, debug=form.debug):
            done = follow_training(parsed, _listener(out), once=once, every_s=every_s, use_cpu=cpu, debug=form.debug)
    return Answer(done.to_dict(), lambda: _summary(done))


@command("trainflow mix pipeline.yaml --weight code=0.5 --weight web=0.5")
def mix(
    form: Form,
    words: SpecWords,
    weight: Annotated[
        list[str] | None,
        typer.Option("--weight", "-w", metavar="SOURCE=NUMBER", help="The new weight of a source; repeatable."),
    ] = None,
) -> Answer:
    """Change weights of the mixture that a training of this spec is trained on, from its next checkpoint on.

    Weights that are not named stay. The change is kept with the training's checkpoints and in the lineage.
    """
    from trainflow.flows.following import change_mixture
    from trainflow.tasks.keys.resolver import Resolver

    pairs = [text.partition("=") for text in weight or []]
    try:
        asked = {name: float(number) for name, _, number in pairs}
    except ValueError:
        asked = {}
    if not asked:
        remedy = "Write for example --weight code=0.5."
        raise ConfigError("A weight is a source and a number.", field="--weight", value=weight, remedy=remedy)
    shares = change_mixture(words.load(Resolver()), asked)
    lines = [Text("From its next checkpoint on the training has these weights:", "green")]
    return Answer({"weights": shares}, lambda: [*lines, *(Text(f"  {name}  {shares[name]:.4g}") for name in shares)])


def _listener(out: Console) -> Listener:
    """Shows what a follower reports; the warnings that the workers of every checkpoint print, once."""
    from trainer_lib.base.durations import describe_seconds
    from trainflow.tasks.follow import Listener
    from trainflow.tasks.stage.progress import measured

    lines: set[str] = set()

    def show_new(line: str) -> None:
        if line not in lines:
            lines.add(line)
            out.print(mask(line), style="dim")

    def show_evaluated(evaluation: Evaluation, is_best: bool) -> None:
        text = measured({"step": evaluation.step, "logs": evaluation.metrics})
        out.print(f"{text} ({describe_seconds(evaluation.seconds)}){', the best so far' if is_best else ''}")

    return Listener(out.print, show_new, show_evaluated)


def _summary(done: Followed) -> list[Text]:
    from trainflow.flows.following import describe_number

    if done.run_id is None:
        return [Text(f"{done.sentence} Nothing is evaluated.")]
    text = f"{done.sentence} {describe_number(len(done.evaluations))}, {done.count} by this command."
    lines = [Text(text, "green")]
    if done.best is not None:
        lines.append(Text(f"  best     step {done.best.step} ({done.best.checkpoint}), kept from rotation"))
    if done.waiting is not None:
        lines.append(Text(f"  waiting  {done.waiting}: trainflow sync delivers it to MLflow"))
    return lines
