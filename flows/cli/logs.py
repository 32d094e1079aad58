"""`trainflow logs`: what the workers of a run wrote, its attempts, and the stacks of a rank that hung or crashed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError, Interrupted, Preempted
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Bare, Debug, Json, print_json
from trainflow.flows.cli.run_choice import Chosen, Run, StorageUrl, choose
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.stages import find_stage, stage_names

if TYPE_CHECKING:
    from trainflow.flows.records.run_logs import Attempt, LogLine

_STYLES = {"warning": "yellow", "stage": "bold", "progress": "dim", "resume": "cyan", "save": "dim", "wait": "yellow"}


def logs(
    run: Run,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STAGE] [SPEC]", help="A stage; a spec, unset: what is in this folder."),
    ] = None,
    storage: StorageUrl = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while the run does.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="What this rank wrote, alone.")] = None,
    bare: Bare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a run's workers wrote, how its attempts ended, and the stacks of those that failed."""
    if follow and as_json:
        raise ConfigError("--json prints one object, so it cannot follow a run.", field="--follow", remedy="Drop one.")
    chosen = choose(words, storage, command="logs")
    stages = _stages_of(chosen)
    from trainflow.flows.records.run_logs import LogReader, follow_lines, read_attempts

    past = chosen.run(run)
    reader = LogReader(chosen.storage, past, stages=stages, rank=rank)
    if as_json:
        lines = [vars(line) for line in reader.read()]
        found = [each.to_dict() for each in read_attempts(chosen.storage, past) if _fits(each.stage, stages)]
        print_json({"ok": True, "exit_code": 0, "id": past.id, "lines": lines, "attempts": found})
        return
    out = terminal.console()
    count = 0
    if follow:
        with contextlib.suppress(Interrupted, Preempted), stoppable(lambda _: None, remedy=""):
            for line in follow_lines(reader, lambda: not _is_at_work(chosen, past.id)):
                out.print(_line(line))
                count += 1
    else:
        shown = [_line(line) for line in reader.read()]
        count = len(shown)
        terminal.show(shown)
    attempts = [each for each in read_attempts(chosen.storage, past) if _fits(each.stage, stages)]
    failed = _failures(attempts) if rank is None else []
    terminal.show(failed, bare=bare)
    if not count and not failed and not bare:
        terminal.console(stderr=True).print("Nothing is kept of what this run's workers wrote.")


def _stages_of(chosen: Chosen) -> list[str] | None:
    """The stages that are named; None: all.

    Raises:
        ConfigError: a word names none.
    """
    if not chosen.words:
        return None
    found = []
    for word in chosen.words:
        row = find_stage(word)
        if row is None:
            raise ConfigError(
                "This is neither a stage nor a spec.", field="STAGE", value=word, remedy=suggestion(word, stage_names())
            )
        found.append(row.name)
    return found


def _fits(stage: str, stages: Sequence[str] | None) -> bool:
    return stages is None or stage in stages


def _is_at_work(chosen: Chosen, run_id: str) -> bool:
    from trainflow.flows.runs.run_status import read_status

    return read_status(chosen.storage, chosen.run(run_id)).is_at_work


def _line(line: LogLine) -> Text:
    rank = f"[rank {line.rank}] " if line.rank else ""
    return Text.assemble(
        (f"{line.at[11:19]} ", "dim"),
        (f"{line.stage} │ ", "dim cyan"),
        (f"{rank}{line.text}", _STYLES.get(line.kind, "")),
    )


def _failures(attempts: Sequence[Attempt]) -> list[Text]:
    """The attempts that failed, with the details that they left: the stacks of a rank that hung, a traceback."""
    lines: list[Text] = []
    for each in attempts:
        if each.outcome in ("committed", "open") and not each.error:
            continue
        place = "".join(f", {key} {each.error[key]}" for key in ("rank", "step") if each.error.get(key) is not None)
        head = f"{each.stage}: attempt {each.number} {each.outcome} {each.ended or ''}{place}"
        lines += [Text(), Text(head, "bold red"), Text(str(each.error.get("message") or ""))]
        if details := each.error.get("details"):
            lines.append(Text(str(details).rstrip(), "dim"))
        if each.decision:
            lines.append(Text(each.decision, "dim"))
    return lines
