"""A model's origin, and whether it comes out again: `trainflow lineage`, `verify`, `reproduce`, `prove-resume`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trainer_lib.base.durations import describe_bytes
from trainer_lib.base.suggestions import counted, to_cell
from trainer_lib.errors import ConfigError, StorageError
from trainflow.flows.cli import terminal
from trainflow.flows.cli.commands.runs import comparison_lines
from trainflow.flows.cli.options import Answer, BareForm, Form, SpecWords, choose, command, use_registry_here
from trainflow.flows.cli.presentation import shown
from trainflow.flows.cli.signals import stoppable
from trainflow.tasks.configs import TrackingConfig

if TYPE_CHECKING:
    from trainflow.flows.lineage.lineage_chain import Chain
    from trainflow.flows.lineage.lineage_checks import LinkCheck, TrackedLinks
    from trainflow.flows.lineage.reproduction import Outcome

_SHORT = 12

Address = Annotated[
    str,
    typer.Argument(
        metavar="X",
        help="Any link: a run, stage, checkpoint or published folder, hf://…, models:/…, or the id of a run.",
        show_default=False,
    ),
]
StorageUrl = Annotated[
    str | None, typer.Option("--storage", metavar="URL", help="The storage of its run, where X does not lie below it.")
]


@command("""
    trainflow lineage last
    trainflow lineage models:/digits@champion --json
""")
def lineage(form: BareForm, address: Address, storage: StorageUrl = None) -> Answer:
    """Print what a model was made from: sources, stages, checkpoints, MLflow run, registered versions, publication."""
    from trainflow.flows.lineage.lineage_checks import find_tracked

    chain, config = _find(address, storage, lenient=False)
    tracked: TrackedLinks | None = None
    why = ""
    try:
        tracked = find_tracked(chain, config)
    except (ConfigError, StorageError) as error:
        why = error.message
    notes = [] if form.quiet else [_fact("note", note) for note in chain.notes]
    return Answer(
        _chain_record(chain, tracked, why), lambda: [*_chain_lines(chain), *_tracked_lines(tracked, why), *notes]
    )


@command("""
    trainflow verify last
    trainflow verify .trainflow/hub/digits
""")
def verify(form: Form, address: Address, storage: StorageUrl = None) -> Answer:
    """Hash every link again, and name the link and the file that breaks. Exit code 16 if one does.

    What cannot be reached from this machine is named as not checked; it does not count as held.
    """
    from trainflow.flows.lineage.lineage_checks import find_failure, verify_chain

    chain, config = _find(address, storage, lenient=True)
    out = form.console()
    checks = []
    # Shown as soon as they are checked: a large model takes minutes.
    for check in verify_chain(chain, config):
        checks.append(check)
        for line in _check_lines(check):
            out.print(line)
    held, unchecked = (sum(check.state == state for check in checks) for state in ("held", "not checked"))
    failure = find_failure(checks)
    if isinstance(failure, ConfigError):  # nothing was checked: there is no answer
        raise failure
    rest = f", {unchecked} not checked" if unchecked else ""
    line = Text(f"{counted(held, 'link')} held{rest}", "green")
    record = {"links": [vars(check) for check in checks], "notes": list(chain.notes)}
    return Answer(record, lambda: [] if failure else [line], failure)


def _find(address: str, storage: str | None, *, lenient: bool) -> tuple[Chain, TrackingConfig]:
    """The chain of an address, and the tracking settings of its storage; a name is looked for in this folder's."""
    from trainflow.flows.lineage.lineage_chain import find_chain

    use_registry_here(address, command="lineage")
    home: str | None = None
    config = TrackingConfig()
    is_word = not ("/" in address or Path(address).exists())
    if is_word or Path("pipeline.yaml").is_file():
        try:
            chosen = choose(None, storage, command="lineage")
            home, config = chosen.storage, chosen.tracking
        except ConfigError:
            if is_word:
                raise
    chain = find_chain(address, storage=storage, home=home, lenient=lenient)
    # The spec of this folder says where the runs of its own storage are tracked, not those of others.
    is_ours = chain.storage is not None and chain.storage.url == home
    return chain, config if is_ours else TrackingConfig()


# -- words ------------------------------------------------------------------------------------------------------------


def _chain_record(chain: Chain, tracked: TrackedLinks | None, why: str) -> dict[str, Any]:
    from trainer_lib.base.records import to_record

    places = {link.stage: folder.url for link in chain.lineage.stages if (folder := chain.stage_folder(link))}
    mlflow = {"not_asked": why} if tracked is None else vars(tracked) | {"versions": list(tracked.versions)}
    return {
        "address": chain.address,
        "kind": chain.kind,
        "lineage": to_record(chain.lineage),
        "storage": None if chain.storage is None else chain.storage.url,
        "places": places,
        "run": None if chain.run is None else chain.run.id,
        "publication": None if chain.publication is None else chain.publication.url,
        "mlflow": mlflow,
        "notes": list(chain.notes),
    }


def _chain_lines(chain: Chain) -> Iterator[Text]:
    lineage = chain.lineage
    yield Text(f"{to_cell(lineage.name) or 'a stage'}  ({chain.kind})", "bold")
    for source in lineage.sources:
        yield _fact("source", f"{source.source}  {source.digest[:_SHORT]}")
    for link in lineage.stages:
        folder = chain.stage_folder(link)
        made_from = f"  from {', '.join(link.inputs)}" if link.inputs else ""
        content = (link.content_digest or "not committed")[:_SHORT]
        yield _fact(link.stage, f"{link.key[:16]}  content {content}{made_from}")
        if folder is not None:
            yield _fact("", shown(folder.url))
        for checkpoint in lineage.checkpoints if link.stage == "train" else ():
            own = "  the model's weights" if checkpoint.name == lineage.exported else ""
            yield _fact(
                "", f"step {checkpoint.step}: {checkpoint.name}  content {checkpoint.content_digest[:_SHORT]}{own}"
            )
    for change in lineage.arguments.get("mixture", ()):
        shares = ", ".join(f"{name} {weight:.4g}" for name, weight in change["weights"].items())
        yield _fact("mixture", f"from step {change['step'] + 1} on {shares}, as it was changed while training")
    if lineage.publication is not None:
        yield _fact("hub", f"{lineage.publication.revision}  content {lineage.publication.content_digest[:_SHORT]}")
    if chain.publication is not None:
        yield _fact("publication", shown(chain.publication.url))
    if chain.run is not None:
        yield _fact("run", str(chain.run))
    if lineage.versions:
        yield _fact("versions", ", ".join(f"{name} {version}" for name, version in lineage.versions.items()))


def _tracked_lines(tracked: TrackedLinks | None, why: str) -> Iterator[Text]:
    if tracked is None:
        yield _fact("MLflow run", why)
        return
    yield _fact("MLflow run", f"{tracked.run_id} in {shown(tracked.uri)}")
    for version in tracked.versions:
        aliases = f"  [{', '.join(version['aliases'])}]" if version["aliases"] else ""
        yield _fact("registered", f"{version['name']} version {version['version']}{aliases}")


def _check_lines(check: LinkCheck) -> Iterator[Text]:
    style = {"held": "green", "broken": "bold red"}.get(check.state, "yellow")
    count = counted(check.files, "file")
    if check.bytes:  # of sources their digests are compared, which count no bytes
        count += f", {describe_bytes(check.bytes)}"
    what = count if check.files else shown(check.where)
    text = check.why if check.state == "not checked" else what
    yield Text.assemble((f"{check.state:<12}", style), f"{check.link:<16} {text}")
    for problem in check.problems:
        yield Text(f"{'':<12}{problem}")


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"  {name:<14}", "dim"), terminal.readable(value))


@command("trainflow reproduce last")
def reproduce(
    form: Form,
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
            help="Compare metrics up to this relative difference; unset: bytes and metrics on a CPU, else 1e-3.",
        ),
    ] = None,
) -> Answer:
    """Run a recorded run again, and compare weights, predictions and metrics. Exit code 20 if they differ.

    The two runs are compared as `trainflow compare` does it. MLflow and hubs are left alone.
    """
    if tolerance is not None and not tolerance < 1:
        raise ConfigError(
            "The tolerance is a relative difference, less than 1.", field="--tolerance", value=tolerance, remedy="1e-3."
        )
    chain, _ = _find(address, storage, lenient=False)
    from trainflow.flows.cli.commands.execution import engine, run_and_show
    from trainflow.flows.lineage.reproduction import Reproduction, open_scratch

    out = form.console()
    run = chain.address if chain.run is None else chain.run.id
    with stoppable(out.print, remedy="Nothing of the run was changed; run it again."), open_scratch(to, run) as place:
        job = Reproduction(chain, place, tolerance, lambda text: out.print(Text(text)))
        with engine(out):
            outcome = job.carry_out(lambda spec, **choice: run_and_show(spec, out, debug=form.debug, **choice))
    return Answer(outcome.to_dict(), lambda: _lines(outcome, kept=to is not None), outcome.failure())


def _lines(outcome: Outcome, *, kept: bool) -> Iterator[Text]:
    same = sum(file["then"] == file["now"] for file in outcome.files)
    yield Text(outcome.verdict, "bold red" if outcome.differences else "green")
    yield Text(f"  files    {same} of {len(outcome.files)} have the same bytes")
    if outcome.tolerance is not None:
        yield Text(f"  metrics  compared up to a relative difference of {outcome.tolerance:g}")
    for sentence in outcome.differences:
        yield Text(f"  differs  {sentence}")
    if kept:
        yield Text(f"  where    {shown(outcome.to)}")
    yield Text()
    yield from comparison_lines(outcome.comparison)


# -- prove-resume -----------------------------------------------------------------------------------------------------


@command("""
    trainflow prove-resume pipeline.yaml --steps 40
    trainflow prove-resume pipeline.yaml --at 25 --kill
""")
def prove_resume(
    form: Form,
    words: SpecWords,
    at: Annotated[
        int | None, typer.Option(min=1, metavar="STEP", help="Stop after this step; between two saves if unset.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=2, metavar="N", help="Train N steps instead of the spec's.")] = None,
    kill: Annotated[bool, typer.Option("--kill", help="Stop by SIGKILL: resume from the last save.")] = False,
    keep: Annotated[str | None, typer.Option(metavar="URL", help="Keep the runs' files there.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the outcome as JSON.")
    ] = None,
) -> Answer:
    """Train twice, once stopped and resumed, and compare every step and every byte. Exit code 20 if they differ.

    The proof has a storage of its own; it leaves the pipeline's storage, MLflow and hubs alone.
    """
    parsed = words.load()
    # After the spec is read: a mistake in it is shown before Prefect is imported.
    from trainflow.flows.lineage.reproduction import Question, describe_record, find_failure, prove, write_record

    out = form.console()
    question = Question(at=at, steps=steps, kill=kill, keep=keep)
    with stoppable(out.print, remedy="Nothing was committed; run it again."):
        record = prove(parsed, question, lambda text: out.print(f"{parsed.name}: {text}"))
    if output is not None:
        write_record(record, output)
    # The record whole, so that its seal holds.
    failure = find_failure(record)
    return Answer({"proof": record}, lambda: [] if failure else describe_record(record), failure)
