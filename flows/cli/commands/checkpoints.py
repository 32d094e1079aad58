"""The commands `trainflow checkpoints list | verify | prune | import`, and `trainflow gc`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trainer_lib.base.durations import describe_bytes
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.paths import expand_home
from trainer_lib.checkpoint import catalogue
from trainer_lib.checkpoint.layout import DAMAGED, parse_step
from trainer_lib.errors import ConfigError, DamagedError, NewerVersionError
from trainer_lib.locks.claim import read_claim
from trainer_lib.locks.lease import find_holder
from trainer_lib.locks.removal import is_kept, list_readers, withdraw_if_unread
from trainer_lib.model_folder.locate import open_link
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, verify_files
from trainflow.flows.cli import terminal
from trainflow.flows.cli.options import Answer, BareForm, Form, PlaceWords, command
from trainflow.flows.cli.presentation import same_command, shown, table
from trainflow.flows.cli.signals import stoppable

if TYPE_CHECKING:
    from trainer_lib.protocol.requests import ImportResult, RecipeFile
    from trainflow.flows.runs.garbage import Garbage, Item

_CHECKPOINTS = "checkpoints"
_STATE = "trainer_state.json"
_STATE_LIMIT = 512 * 2**20
_COLOURS = {"good": "green", "damaged": "bold red"}

Url = Annotated[str, typer.Argument(metavar="URL", help="A checkpoints folder, a stage's folder, or a storage.")]


@command("trainflow checkpoints list s3://bucket/project")
def list_(form: BareForm, url: Url) -> Answer:
    """List checkpoints, newest first: step, time, size and state. Sizes are compared, bytes are not read (verify)."""
    entries = find(url)
    return Answer(
        {"checkpoints": [entry.to_dict() for entry in entries]}, lambda: _listing(entries)[1 if form.quiet else 0 :]
    )


@command("trainflow checkpoints verify .trainflow")
def verify(
    form: Form, url: Annotated[str, typer.Argument(metavar="URL", help="A checkpoint, or a folder of them.")]
) -> Answer:
    """Read every byte of committed checkpoints and compare sizes and digests. Exit code 16 if one is damaged."""
    entries = find(url)
    total = sum(entry.bytes for entry in entries if entry.info is not None)
    problems: dict[str, list[str]] = {}
    # Read in full before anything is printed: the JSON form is one object.
    with terminal.reading(terminal.console(stderr=True), total, quiet=form.quiet or form.as_json) as on_read:
        for entry in entries:
            if entry.info is not None:
                problems[entry.url] = verify_files(entry.store, entry.info.commit, on_read=on_read)
            elif entry.state == "damaged":  # set aside; what was never committed is not looked at
                problems[entry.url] = list(entry.problems)
    intact = [Text(f"intact  {shown(url)}", "green") for url in problems] or [Text("Nothing is committed there.")]
    error = _damage(problems)
    return Answer({"checkpoints": problems}, lambda: [] if error else intact, error)


@command("trainflow checkpoints prune .trainflow --keep 2 --dry-run")
def prune(
    form: Form,
    url: Url,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of committed checkpoints to keep.", show_default=False)
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
) -> Answer:
    """Remove the oldest checkpoints beyond N, and what interrupted saves left.

    Never the best, the newest good one (every byte of it is read), one being read or written, or another program's.
    Those that were set aside as damaged stay for you to look at.
    """
    removed: list[dict[str, Any]] = []
    for entry, why in _victims(find(url), keep):
        record = {"url": entry.url, "step": entry.step, "bytes": entry.bytes, "why": why}  # while it can be measured
        # The commit file goes first; one that a reader has opened meanwhile stays.
        if dry_run or withdraw_if_unread(entry.store):
            removed.append(record)
    freed = sum(record["bytes"] for record in removed)
    verb, ended = ("would remove", "would be freed") if dry_run else ("removed", "freed")
    lines = [
        Text(f"{verb}  {shown(record['url'])}  {describe_bytes(record['bytes'])}  {record['why']}")
        for record in removed
    ]
    lines.append(Text(f"{describe_bytes(freed)} {ended}" if removed else "Nothing has to go.", "bold"))
    return Answer({"dry_run": dry_run, "removed": removed, "bytes": freed}, lambda: lines)


@command("trainflow checkpoints import old/checkpoint-5000 s3://bucket/run --model train.py:build_model")
def import_(
    form: Form,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint-N folder of the transformers Trainer.")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION", help="The folder of checkpoints to resume in.")],
    model: Annotated[
        str,
        typer.Option(metavar="FILE.py:FUNCTION", help="A function of yours that returns the model as it was trained."),
    ],
) -> Answer:
    """Import a checkpoint that the transformers Trainer wrote: weights, optimizer, schedule, log.

    No code in it is run: pickles go through a reader that makes only tensors and numbers; training_args.bin is never
    opened. Resume with output_dir=DESTINATION and resume_from_checkpoint=True.
    """
    from trainer_lib.base.records import to_record
    from trainer_lib.launch.base import launch
    from trainer_lib.launch.settings.config import LaunchConfig
    from trainer_lib.protocol.requests import ImportRequest

    recipe, function = _function(model)
    output, read = Store.open(destination, field="destination"), Store.open(source, field="source")
    catalogue.require_importable(read)  # before a worker is started
    request = ImportRequest(output=output.url, source=read.url, recipe=recipe, model=function, debug=form.debug)
    out = terminal.console(stderr=True, quiet=form.quiet)
    with stoppable(out.print, remedy="Nothing was committed; run it again."), out.status("importing"):
        result = launch(
            request,
            LaunchConfig(kind="process", processes=1),
            env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},  # nothing that the folder names is fetched
            on_line=lambda line: out.print(line, style="dim"),
            on_event=lambda event: None,
        )
    return Answer(to_record(result), lambda: _imported(result, destination))


def _function(text: str) -> tuple[RecipeFile, str]:
    """The file and the function that ``FILE.py:FUNCTION`` names."""
    from trainer_lib.protocol.requests import RecipeFile

    # From the right: the path itself may hold a colon.
    path, _, name = text.rpartition(":")
    file = expand_home(path).absolute()
    if not name.isidentifier() or not file.is_file():
        has_form = name.isidentifier() and path
        what = "This file does not exist." if has_form else "This is not of the form FILE.py:FUNCTION."
        remedy = "Write for example --model train.py:build_model, a function without arguments."
        raise ConfigError(what, field="--model", value=text, remedy=remedy)
    return RecipeFile(str(file), str(file.parent)), name


def _imported(result: ImportResult, destination: str) -> list[Text]:
    left_out = ", ".join(result.left_out) or "nothing"
    return [
        Text(f"imported  step {result.step}, {result.parameters} parameters, {describe_bytes(result.bytes)}", "green"),
        Text(f"  where     {shown(result.url)}"),
        Text(f"  left out  {left_out}"),
        *(Text(f"  note      {note}") for note in result.notes),
        Text(f"  resume    output_dir={shlex.quote(destination)} resume_from_checkpoint=True"),
    ]


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A folder that is named like a checkpoint."""

    root: Store  # the folder of its run's checkpoints
    name: str
    step: int
    # ``good`` (committed, every file there in its size), ``damaged``, ``uncommitted`` (left by an interrupted save),
    # ``being written``, ``foreign`` (another program's), ``newer version`` (of trainflow) or ``link``.
    state: str
    info: catalogue.CheckpointInfo | None = None  # its commit, where there is a valid one
    problems: tuple[str, ...] = ()  # lines about what is wrong, or what it is
    best: bool = False  # whether the newest checkpoint of its run records it as the best
    readers: tuple[str, ...] = ()  # the processes that read it now
    kept: bool = False  # whether it is marked as one that stays (`trainflow follow` marks the best)

    @property
    def store(self) -> Store:
        """Its folder."""
        return self.root.child(self.name)

    @property
    def url(self) -> str:
        """The address."""
        return self.store.url

    @property
    def bytes(self) -> int:
        """Its size: what was committed, else what is there."""
        if self.info is not None:
            return sum(file.size for file in self.info.commit.files)
        return 0 if self.state == "link" else sum(file.size for file in self.store.list())

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        commit = self.info.commit if self.info is not None else None
        return {
            "step": self.step,
            "url": self.url,
            "state": self.state,
            "best": self.best,
            "kept": self.kept,
            "in_use": list(self.readers),
            "created": commit.created if commit else None,
            "files": len(commit.files) if commit else None,
            "bytes": self.bytes,
            "content_digest": commit.content_digest if commit else None,
            "problems": list(self.problems),
        }


def find(url: str) -> list[Entry]:
    """Everything named like a checkpoint at `url`, newest step first within each run; ConfigError for nothing."""
    store = open_link(url, field="url")
    parent, _, name = store.url.rstrip("/").rpartition("/")
    is_stage = bool(store.children(_CHECKPOINTS))  # which has a commit file as well
    # A checkpoint that was not committed has no commit file, but it has a checkpoint's name.
    if not is_stage and (store.exists(COMMIT) or (parse_step(name) is not None and store.children())):
        # The newest checkpoint of the run records which one is best; for one checkpoint alone that is not looked up.
        return [_entry(Store.open(parent or "/"), name, None)]
    stages = store.child("stages", "train")
    roots = (store, store.child(_CHECKPOINTS), *(stages.child(key, _CHECKPOINTS) for key in stages.children()))
    entries = [entry for root in roots for entry in _entries(root)]
    if not entries:
        known = catalogue.recognise_folder(store)
        what = f"No checkpoint is there, but {known.what}." if known else "No committed checkpoint is there."
        usual = "Name a storage, a train stage's folder, its checkpoints folder, or one checkpoint."
        raise ConfigError(what, field="url", value=url, remedy=known.remedy if known else usual)
    return entries


def _entries(root: Store) -> list[Entry]:
    steps = {
        name: step
        for name in {*root.children(), *catalogue.list_linked(root)}
        if (step := parse_step(name)) is not None
    }
    names = sorted(steps, key=lambda name: steps[name], reverse=True)
    best = _best(root, names)
    return [_entry(root, name, best) for name in names]


def _entry(root: Store, name: str, best: int | None) -> Entry:
    step = parse_step(name)
    step = -1 if step is None else step
    if name in catalogue.list_linked(root):
        return Entry(root, name, step, "link", problems=("a link, which is not followed",))
    store = root.child(name)
    try:
        info = catalogue.read_checkpoint_info(root, name)
        if info is not None:
            problems = tuple(verify_files(store, info.commit, digests=False))
            using = tuple(map(str, list_readers(store)))
            state = "damaged" if problems else "good"
            is_best, kept = info.step == best, is_kept(store)
            return Entry(root, name, info.step, state, info, problems, is_best, using, kept)
    except DamagedError as error:
        state = "newer version" if isinstance(error, NewerVersionError) else "damaged"
        return Entry(root, name, step, state, problems=(f"{COMMIT}: {error.message}",))
    # No commit, but a note: a resume found it damaged and withdrew its commit.
    if store.exists(DAMAGED):
        return Entry(root, name, step, "damaged", problems=(f"set aside, see {DAMAGED}",))
    known = catalogue.recognise_folder(store)
    if known is not None:
        return Entry(root, name, step, "foreign", problems=(known.what,))
    claim = read_claim(store)
    if claim is not None and not claim.is_gone():
        return Entry(root, name, step, "being written", problems=(f"by {claim}",))
    return Entry(root, name, step, "uncommitted")


def _best(root: Store, names: Sequence[str]) -> int | None:
    """The step that the newest readable checkpoint records as the best; None when none records one."""
    for name in names:
        try:
            info = None if name in catalogue.list_linked(root) else catalogue.read_checkpoint_info(root, name)
            if info is not None and info.commit.entry(_STATE) is not None:
                state = parse_json(root.child(name).read_bytes(_STATE, limit=_STATE_LIMIT), dict)
                best = state.get("best_global_step")
                # Not isinstance: True is an int, and the file may come from anywhere.
                return best if type(best) is int else None
        except (DamagedError, ValueError):
            continue
    return None


def _victims(entries: Sequence[Entry], keep: int) -> Iterator[tuple[Entry, str]]:
    """Checkpoints that retention would remove, with reasons: the oldest beyond `keep`, and rests of interrupted saves.

    Never the best, one that is marked to be kept, the newest whose every byte is good and what is newer, the newest
    that can be resumed from, one that a process reads or writes (or whose writer cannot be seen from here), what
    another program wrote, or what was set aside as damaged.
    """
    # Runs keep their own newest ones, and a storage may hold several runs.
    for root in {entry.root.url: entry.root for entry in entries}.values():
        of_run = {entry.name: entry for entry in entries if entry.root.url == root.url}
        best = {entry.name for entry in of_run.values() if entry.best}
        for info in catalogue.list_excess(root, keep=keep, protect=best):
            yield of_run[info.name], f"beyond the newest {keep}"
        # The stage's lease is next to `checkpoints/`: while it is held, an uncommitted folder may be a save under way.
        if find_holder(Store.open(root.url.rpartition("/")[0] or "/")) is None:
            leftovers = (entry for entry in of_run.values() if entry.state == "uncommitted")
            yield from ((entry, "left by an interrupted save") for entry in leftovers)


def _listing(entries: Sequence[Entry]) -> list[Text]:
    rows = [("step", "committed", "size", "state", "where"), *(_row(entry) for entry in entries)]
    lines = table(rows, [(_COLOURS.get(entry.state, ""),) * 5 for entry in entries], right=frozenset({0, 2}))
    for entry in entries:
        notes = [*entry.problems, *(f"read by {reader}" for reader in entry.readers)]
        lines += [Text(f"  step {entry.step}: {note}", "dim") for note in notes]
    return lines


def _row(entry: Entry) -> tuple[str, str, str, str, str]:
    when = terminal.readable(entry.info.commit.created) if entry.info is not None else "-"
    notes = {"best": entry.best, "kept": entry.kept, "in use": bool(entry.readers)}
    state = ", ".join([entry.state, *(note for note, holds in notes.items() if holds)])
    return str(entry.step), when, describe_bytes(entry.bytes), state, shown(entry.url)


def _damage(problems: dict[str, list[str]]) -> DamagedError | None:
    damaged = [f"{shown(url)}: {problem}" for url, sentences in problems.items() for problem in sentences]
    if not damaged:
        return None
    more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
    remedy = "A resume takes the newest intact one by itself; remove the damaged folder."
    return DamagedError(f"{damaged[0]}{more}.", field="checkpoints", remedy=remedy, details="\n".join(damaged))


# -- garbage ----------------------------------------------------------------------------------------------------------


@command("""
    trainflow gc --keep 10
    trainflow gc --keep 10 --delete
""")
def collect_garbage(
    form: BareForm,
    place: PlaceWords,
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
) -> Answer:
    """Show what nothing refers to (results, checkpoints, leftovers), and remove it with --delete.

    Never what a recorded run, a tag, a registered version or a publication refers to, and nothing that a process works
    in or reads.
    """
    chosen = place.choose("gc")
    from trainflow.flows.runs.garbage import find_garbage, remove_garbage

    out = terminal.console(stderr=True, quiet=form.quiet)
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
                on_removed=lambda item: None if form.as_json else terminal.show([_line(item, "removed")]),
            )
    record = {"storage": chosen.storage, "deleted": delete, **_garbage_record(garbage, removed)}
    if not delete:
        return Answer(record, lambda: _removable(garbage, bare=form.quiet))
    return Answer(record, lambda: [] if form.quiet else _rest(garbage, removed))


def _garbage_record(garbage: Garbage, removed: Sequence[Item]) -> dict[str, Any]:
    return {
        "items": [{"kind": item.kind, "url": item.store.url, "bytes": item.bytes, "why": item.why} for item in removed],
        "bytes": sum(item.bytes for item in removed),
        "kept": garbage.kept,
        "in_use": garbage.in_use,
        "links": garbage.links,
        "obstacle": None if garbage.obstacle is None else garbage.obstacle.to_record(),
    }


def _line(item: Item, verb: str) -> Text:
    return Text(f"{verb}  {item.kind}  {shown(item.store.url)}  {describe_bytes(item.bytes)}  {item.why}")


def _removable(garbage: Garbage, *, bare: bool) -> list[Text]:
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
    total = f"{describe_bytes(garbage.bytes)} would be freed: {same_command('--delete')}"
    return [*lines, Text(total if garbage.items else "Nothing can go.", "bold")]


def _in_use(garbage: Garbage) -> list[Text]:
    links = [Text(f"link  {shown(url)}  neither followed nor removed", "yellow") for url in garbage.links]
    return [Text(f"in use  {shown(url)}  {who}", "dim") for url, who in garbage.in_use.items()] + links


def _rest(garbage: Garbage, removed: Sequence[Item]) -> list[Text]:
    gone = {item.store.url for item in removed}
    lines = [_line(item, "kept, it is needed by now") for item in garbage.items if item.store.url not in gone]
    freed = f"{describe_bytes(sum(item.bytes for item in removed))} freed." if removed else "Nothing had to go."
    return [*lines, *_in_use(garbage), Text(freed, "bold")]
