"""`trainflow gc`: what nothing refers to any more, and its removal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Bare, Debug, Json, print_json
from trainflow.flows.cli.presentation import same_command, shown
from trainflow.flows.cli.run_choice import Place, StorageUrl, choose_place
from trainflow.flows.cli.signals import stoppable
from trainflow.flows.cli.tables import table
from trainflow.flows.records.sizes import describe_bytes
from trainflow.flows.server.api import quiet_environment

if TYPE_CHECKING:
    from trainflow.flows.runs.garbage import Garbage, Item


def collect_garbage(
    place: Place = None,
    storage: StorageUrl = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Also remove runs beyond the newest N of each pipeline, and what only they refer to.",
            show_default=False,
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", "--yes", help="Remove it; without this it is only shown.")
    ] = False,
    skip_registry: Annotated[
        bool, typer.Option("--skip-registry", help="Do not ask MLflow which models are registered.")
    ] = False,
    bare: Bare = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what nothing refers to (results, checkpoints, leftovers), and remove it with --delete.

    Never what a recorded run, a tag, a registered version or a publication refers to, and nothing that a process works
    in or reads.
    """
    quiet_environment()
    chosen = choose_place(place, storage, command="gc")
    from trainflow.flows.runs.garbage import find_garbage, remove_garbage

    out = terminal.console(stderr=True, quiet=bare)
    with out.status("looking for what nothing refers to"):
        garbage = find_garbage(chosen.storage, keep=keep, config=chosen.tracking, skip_registry=skip_registry)
    removed: Sequence[Item] = garbage.items
    if delete:
        with stoppable(out.print, remedy="What is removed is gone whole; the same command removes the rest."):
            removed = remove_garbage(
                chosen.storage,
                garbage,
                config=chosen.tracking,
                skip_registry=skip_registry,
                on_removed=lambda item: None if as_json else terminal.show([_line(item, "removed")]),
            )
    if as_json:
        _print(chosen.storage, garbage, removed, deleted=delete)
    elif not delete:
        terminal.show(_found(garbage, bare=bare, again=same_command("--delete")))
    elif not bare:
        terminal.show(_rest(garbage, removed))


def _print(storage: str, garbage: Garbage, removed: Sequence[Item], *, deleted: bool) -> None:
    print_json(
        {
            "ok": True,
            "exit_code": 0,
            "storage": storage,
            "deleted": deleted,
            "items": [item.to_dict() for item in removed],
            "bytes": sum(item.bytes for item in removed),
            "kept": garbage.kept,
            "in_use": garbage.in_use,
            "links": garbage.links,
            "obstacle": None if garbage.obstacle is None else garbage.obstacle.to_record(),
        }
    )


def _line(item: Item, verb: str) -> Text:
    return Text(f"{verb}  {item.kind}  {shown(item.store.url)}  {describe_bytes(item.bytes)}  {item.why}")


def _found(garbage: Garbage, *, bare: bool, again: str) -> list[Text]:
    lines: list[Text] = []
    if garbage.items:
        rows = [("what", "size", "where", "why")]
        rows += [(item.kind, describe_bytes(item.bytes), shown(item.store.url), item.why) for item in garbage.items]
        lines += table(rows, right=frozenset({1}), bare=bare)
    if bare:
        return lines
    lines += _in_use(garbage)
    if garbage.obstacle is not None:
        lines.append(Text(f"warning: {garbage.obstacle.message} {garbage.obstacle.remedy}", "yellow"))
    total = f"{describe_bytes(garbage.bytes)} would be freed: {again}" if garbage.items else "Nothing can go."
    return [*lines, Text(total, "bold")]


def _in_use(garbage: Garbage) -> list[Text]:
    links = [Text(f"link  {shown(url)}  neither followed nor removed", "yellow") for url in garbage.links]
    return [Text(f"in use  {shown(url)}  {who}", "dim") for url, who in garbage.in_use.items()] + links


def _rest(garbage: Garbage, removed: Sequence[Item]) -> list[Text]:
    gone = {item.store.url for item in removed}
    left = [item for item in garbage.items if item.store.url not in gone]
    lines = [_line(item, "kept, it is needed by now") for item in left]
    freed = f"{describe_bytes(sum(item.bytes for item in removed))} freed." if removed else "Nothing had to go."
    return [*lines, *_in_use(garbage), Text(freed, "bold")]
