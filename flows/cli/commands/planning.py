"""`trainflow plan`: what a run will do and take, and what of it cannot work, before it is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from trainer_lib.base.durations import describe_bytes, describe_seconds
from trainer_lib.base.suggestions import counted, number_words
from trainflow.flows.cli import presentation, terminal
from trainflow.flows.cli.options import Answer, BareForm, command
from trainflow.flows.cli.run_choice import SpecWords
from trainflow.tasks.keys.resolver import Resolver

if TYPE_CHECKING:
    from trainer_lib.protocol.footprint import Footprint
    from trainflow.flows.planning.forecast import Forecast, Length
    from trainflow.flows.planning.full_plan import FullPlan
    from trainflow.flows.planning.obstacles import Obstacle
    from trainflow.flows.planning.plan import Plan

_NAMES = {
    "single": "one process",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "zero-1": "ZeRO 1",
    "zero-2": "ZeRO 2",
    "zero-3": "ZeRO 3",
    "layout": "the layout",
}
_PARTS = ("parameters", "gradients", "optimizer", "activations", "exchange", "total")
_UNKNOWN = "?"
_SHOWN_LINES = 12  # of a conversation


def describe(plan: Plan, found: Forecast, obstacles: Sequence[Obstacle]) -> list[Text]:
    """The costs of the training by section, then what is missing and what cannot work."""
    lines = [*_arguments(plan), *_length(found), *_memory(found), *_room(found), *_time(found)]
    lines += [_row("missing", sentence, "yellow") for sentence in found.missing]
    for obstacle in obstacles:
        lines += _obstacle(obstacle)
    return [*lines, Text()]


def _data(full: FullPlan) -> Iterator[Text]:
    """Sentences of the recipe about the prepared data, and conversations, trained parts coloured, or in ⟦⟧."""
    for number, sentence in enumerate(full.summary):
        yield _row("" if number else "data", sentence)
    out = terminal.console()
    has_colour = out.color_system is not None and not out.no_color
    for shown in full.conversations:
        yield _row("trained", shown["place"])
        marks = [
            (text if has_colour or not is_trained else f"⟦{text}⟧", is_trained) for text, is_trained in shown["parts"]
        ]
        lines = Text.assemble(*((text, "green" if is_trained else "dim") for text, is_trained in marks)).split("\n")
        yield from (Text.assemble("    ", line) for line in lines[:_SHOWN_LINES])
        if len(lines) > _SHOWN_LINES:
            yield Text(f"    and {len(lines) - _SHOWN_LINES:,} more lines", "dim")


def _arguments(plan: Plan) -> list[Text]:
    from trainer_lib.arguments import TrainingArguments
    from trainflow.flows.planning.full_plan import effective_arguments

    values, defaults = effective_arguments(plan), TrainingArguments().to_dict()
    differ = [f"{name} {value}" for name, value in values.items() if value != defaults.get(name)]
    rest = len(values) - len(differ)
    note = f"the other {rest} have their defaults (--json lists them)"
    return [_row("arguments", "; ".join([*differ, note]))]


def _length(found: Forecast) -> Iterator[Text]:
    length = found.length
    if length is None:
        return
    tokens = "" if found.tokens is None else f", {found.tokens:,} tokens"
    yield _row("training", f"{counted(length.steps, 'step')}, {length.samples:,} samples{tokens}")
    yield _row("", length.step)
    yield _row("", f"{number_words(length.epochs)} passes over the data, {_often(length)}")


def _often(length: Length) -> str:
    evaluated = f"{counted(length.evaluations, 'evaluation')} of {counted(length.evaluated_rows, 'row')}"
    return f"{evaluated if length.evaluations else 'no evaluation'}, {counted(length.saves, 'save')}"


def _memory(found: Forecast) -> list[Text]:
    if found.estimate is None:
        return []
    size = found.estimate.size
    frozen = "" if size.trainable == size.parameters else f", {size.trainable:,} of them trained"
    lines = [_row("model", f"{size.parameters:,} parameters{frozen}")]
    ranks = found.footprints()
    processes = max(rank.processes for rank in ranks)
    heading = f"of a rank on {counted(processes, 'process', 'processes')} ({found.estimate.device}); * is the spec's"
    lines.append(_row("memory", f"{heading} strategy"))
    columns = [_cells(rank, marked=rank.strategy == found.strategy) for rank in ranks]
    rows = list(zip(("", *_PARTS), *columns, strict=True))
    lines += presentation.table(rows, right=frozenset(range(1, len(rows[0]))), indent="    ")
    if found.peak_bytes is not None:
        lines.append(_row("", _peak(found)))
    return lines + [_row("", note, "yellow") for note in found.estimate.notes]


def _peak(found: Forecast) -> str:
    peak = describe_bytes(found.peak_bytes or 0)
    if found.probe is not None:
        return f"peak of a process, measured: {peak}"
    if found.estimate is not None and found.estimate.device == "cpu":
        own = describe_bytes(found.estimate.process_bytes)
        return f"peak of a process: {peak}, of which the interpreter and its libraries take {own}"
    return f"peak of a process: {peak}"


def _cells(rank: Footprint, *, marked: bool) -> tuple[str, ...]:
    return (("* " if marked else "") + _NAMES[rank.strategy], *(_bytes(getattr(rank, name)) for name in _PARTS))


def _bytes(value: int | None) -> str:
    return _UNKNOWN if value is None else describe_bytes(value)


def _room(found: Forecast) -> Iterator[Text]:
    room = found.room
    if room is None:
        return
    if room.checkpoint_bytes is None or room.needed_bytes is None:
        size = "the size of a checkpoint is not known"
    else:
        kept = f"{room.kept} at most" if room.kept != 1 else "one"
        size = f"a checkpoint {describe_bytes(room.checkpoint_bytes)}, {kept} at a time; with the model "
        size += f"{describe_bytes(room.needed_bytes)}"
    free = (
        "the store does not say what is free"
        if room.free_bytes is None
        else f"free are {describe_bytes(room.free_bytes)}"
    )
    yield _row("storage", f"{size}; {free}")


def _time(found: Forecast) -> Iterator[Text]:
    if found.length is None:
        return
    if found.seconds is None:
        yield _row("time", "not known: --probe measures a few steps")
    else:
        yield _row("time", f"about {describe_seconds(found.seconds)} for train, from a probe of a few steps")


def _obstacle(obstacle: Obstacle) -> Iterator[Text]:
    place = " = ".join(text for text in (obstacle.field, obstacle.value) if text)
    style, word = ("bold red", "cannot work") if obstacle.is_fatal else ("yellow", "note")
    yield Text.assemble((f"  {word:<12} ", style), f"{place}: {obstacle.what}" if place else obstacle.what)
    if obstacle.remedy:
        yield _row("", obstacle.remedy)


def _row(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"  {label:<12} ", "dim"), (text, style))


@command("""
    trainflow plan pipeline.yaml
    trainflow plan pipeline.yaml train.launch.processes=4 --probe
""")
def plan(
    form: BareForm,
    words: SpecWords,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Prepare the data if it is not, train a few real steps, and measure time and memory."
        ),
    ] = False,
) -> None:
    """Show what a run will do and take: stages, steps, memory of a rank, time, room; and what of it cannot work.

    The exit code is 2 if something cannot work.
    """
    parsed = words.load(Resolver())
    from trainflow.flows.planning.full_plan import plan_in_full
    from trainflow.flows.planning.plan import Plan

    during = terminal.console(stderr=True, quiet=form.quiet).status
    full = plan_in_full(Plan.of(parsed, debug=form.debug), probe=probe, during=during)
    reasons = list(full.plan.reasons.values())
    lines = [*presentation.reasons(reasons, full.warnings), *_data(full)]
    lines += describe(full.plan, full.forecast, full.obstacles)
    Answer(full.to_dict(), lambda: lines).show(form)
    if not full.can_work:
        raise typer.Exit(2)
