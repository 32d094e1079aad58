"""The Publisher: what the Trainer pushes to a hub, when, and with which card.

::

    on_save        -> every_save: the checkpoint's model; checkpoint: also all of it as last-checkpoint/;
                      all_checkpoints: also all of it as checkpoint-<step>/       (in the background)
    end of train() -> the final model, with its metrics on the card (all strategies); then wait for pending pushes

A push reads committed files in a thread of its own, so saving never waits for the Hub. While a push is under way the
next one is skipped; `hub_always_push` queues it instead. A failed push never ends training. `hub_model_id` names a
repository, or a folder on any store.

The Publisher calls the Trainer's documented methods, never its own version of them: a subclass's override is what runs.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from trainer_lib.arguments import HubStrategy, TrainingArguments
from trainer_lib.checkpoint import layout
from trainer_lib.checkpoint.layout import KIND, checkpoint_name, parse_step
from trainer_lib.checkpoint.reader import open_checkpoint
from trainer_lib.checkpoint.writer import start_daemon
from trainer_lib.distributed.communicator import Communicator, run_on_all_ranks
from trainer_lib.errors import ConfigError, StorageError, TrainflowError
from trainer_lib.hub.base import SCHEME, Content, Source
from trainer_lib.hub.card import Card, as_list, parse_card_head, render_card, tidy_metrics
from trainer_lib.hub.folder import FolderHub
from trainer_lib.locks.removal import protect_from_removal
from trainer_lib.secrets import mask
from trainer_lib.storage import FileEntry, Store
from trainer_lib.storage.commit import COMMIT, read_commit

if TYPE_CHECKING:
    # Imported at the first push to a repository: it loads the Hub's client.
    from trainer_lib.hub.huggingface import HuggingFaceHub
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)
README = "README.md"
LAST = "last-checkpoint"
_CHECKPOINT = checkpoint_name(0).removesuffix("0")
_CHECKPOINTS = (_CHECKPOINT, f"{LAST}/")  # stay on the Hub when a revision has no files under them
_CARD_LIMIT_BYTES = 1 << 20
# Files that only a resume reads: the model at the repository's root does without them.
_RESUMING = {layout.OWN_MODEL, layout.OPTIMIZER_TENSORS, layout.OPTIMIZER, layout.SCHEDULER, layout.SCALER}
_RESUMING |= {layout.DATA, layout.TRAINER_STATE, layout.SHARD_INDEX}


_REPOSITORY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# Arguments that say where things are, not how the model was trained.
_PLACES = ("output_dir", "logging_dir", "resume_from_checkpoint", "local_rank")


@dataclass(frozen=True)
class CardDetails:
    """Values that a caller of `create_model_card` sets; they replace the Trainer's. See `Card`."""

    language: str | Sequence[str] | None = None
    license: str | None = None
    tags: str | Sequence[str] | None = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: str | Sequence[str] | None = None
    dataset_tags: str | Sequence[str] | None = None
    dataset: str | Sequence[str] | None = None
    dataset_args: str | Sequence[str] | None = None


class PushQueue:
    """A queue of pushes. Its threads are daemons: a push under way does not keep the process alive."""

    def __init__(self) -> None:
        self.newest: Future[str] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a push is under way or waiting."""
        return self.newest is not None and not self.newest.done()

    def is_done(self) -> bool:
        """Whether no push is under way; `huggingface_hub` and transformers use this name."""
        return not self.is_busy

    def wait_until_done(self) -> None:
        """Wait for all pushes."""
        self.wait(unless=lambda: False)

    def submit(self, push: Callable[[], str]) -> Future[str]:
        """Run `push` after the ones before it. The future holds what it returns or raises."""
        # A chain of futures in place of a pool, whose threads Python would wait for at exit.
        before = self.newest

        def run() -> str:
            if before is not None:
                wait([before])
            return push()

        self.newest = start_daemon(run, "hub push")
        return self.newest

    def wait(self, *, unless: Callable[[], bool], poll_s: float = 0.2) -> bool:
        """Wait for all pushes, or until `unless()` is true; return whether all pushes ended."""
        while self.is_busy and self.newest is not None:
            if unless():
                return False
            wait([self.newest], timeout=poll_s)
        return True


class Publisher:
    """Owns a Trainer's pushes: the queue, the checkpoints that are being read, and the base model's licence."""

    def __init__(self, trainer: Trainer, *, comm: Callable[[], Communicator]) -> None:
        self._trainer = trainer
        self._comm = comm
        self.queue = PushQueue()
        self._being_pushed: list[str] = []
        self._base_licence: tuple[str, str | None] | None = None

    @property
    def checkpoints_being_pushed(self) -> frozenset[str]:
        """Names of the checkpoint folders that a push still reads; rotation must keep them."""
        return frozenset(self._being_pushed)

    @property
    def push_in_progress(self) -> PushQueue | None:
        """The queue of pushes; None when nothing was pushed yet."""
        return self.queue if self.queue.newest is not None else None

    # -- the target ---------------------------------------------------------------------------------------------------

    def prepare_target(self) -> None:
        """With `push_to_hub`: create the target before anything is spent on training. Collective.

        A Hub that cannot be reached is tried again at the first push. Raises ConfigError for a name or token that is
        refused.
        """
        if not self._trainer.args.push_to_hub:
            return
        try:
            run_on_all_ranks(self._comm(), self._trainer.init_hf_repo)
        except StorageError as error:
            _log.warning("The Hub cannot be reached; training starts and pushes later: %s", mask(str(error)))

    def create_target(self, token: str | None = None) -> str:
        """Create the repository or folder of `hub_model_id`; return its full name. On the main process.

        Raises ConfigError when the name or the token is refused, and StorageError when the Hub cannot be reached.
        """
        target = self._wanted_name()
        if is_folder(target):
            Store.open(target, field="hub_model_id").ensure_writable(field="hub_model_id")
            return target
        if not _REPOSITORY.fullmatch(target.removeprefix(SCHEME)):
            what = "The name is neither a repository nor a folder."
            remedy = 'Give hub_model_id="owner/name", or the URL of a folder.'
            field = "hub_model_id" if self._trainer.args.hub_model_id else "output_dir"
            raise ConfigError(what, field=field, value=target, remedy=remedy)
        return self._open_repository(target.removeprefix(SCHEME), token).create()

    def _wanted_name(self) -> str:
        args = self._trainer.args
        return args.hub_model_id or PurePosixPath(str(args.output_dir).rstrip("/")).name

    def _open_repository(self, target: str, token: str | None, branch: str | None = None) -> HuggingFaceHub:
        from trainer_lib.hub.huggingface import HuggingFaceHub

        private, used = self._trainer.args.hub_private_repo, token or self._trainer.args.hub_token
        return HuggingFaceHub(target, branch=branch, private=private, field="hub_model_id", token=used)

    # -- the card -----------------------------------------------------------------------------------------------------

    def write_card(self, details: CardDetails) -> None:
        """Write README.md to output_dir: `details` first, then what a present card says, then what is known."""
        trainer, store = self._trainer, self._output_store()
        text = (store.read_if_exists(README, limit=_CARD_LIMIT_BYTES) or b"").decode(errors="replace")
        present, model = parse_card_head(text), trainer.model
        base = details.finetuned_from or _source_repository(model) or _text(present.get("base_model"))
        history = reversed(trainer.state.log_history)
        measured = ({name: entry[name] for name in entry if name.startswith("eval_")} for entry in history)
        tags = [present.get("tags"), details.tags, getattr(model, "model_tags", None)]
        card = Card(
            # A folder may have a name that no repository can have: its card is written all the same.
            title=details.model_name or PurePosixPath((trainer.hub_model_id or self._wanted_name()).rstrip("/")).name,
            description="Draft of a card, written by the Trainer: complete it.",
            license=details.license or _text(present.get("license")) or self._licence_of(base),
            tags=[tag for some in tags for tag in as_list(some)],
            base_model=base,
            metrics=tidy_metrics({"eval": next(filter(None, measured), {})}),  # the newest
            arguments=_changed_arguments(trainer.args),
            facts={"optimizer steps": trainer.state.global_step, "epochs": round(float(trainer.state.epoch), 2)},
            library=_text(present.get("library_name")) or "trainflow",
            language=as_list(details.language) or as_list(present.get("language")),
            tasks=as_list(details.tasks) or as_list(present.get("pipeline_tag")),
            datasets=as_list(details.dataset_tags) or as_list(present.get("datasets")),
            dataset_names=as_list(details.dataset),
            dataset_args=as_list(details.dataset_args),
        )
        store.write_bytes(README, render_card(card).encode())

    def _licence_of(self, base: str | None) -> str | None:
        """The licence of the base model; the Hub is asked once, since every push writes a card."""
        # A push to a folder works offline: it never asks the Hub.
        if base is None or is_folder(self._wanted_name()):
            return None
        if self._base_licence is None or self._base_licence[0] != base:
            from trainer_lib.hub.huggingface import find_licence

            self._base_licence = (base, find_licence(base, token=self._trainer.args.hub_token))
        return self._base_licence[1]

    def _output_store(self) -> Store:
        return Store.open(str(self._trainer.args.output_dir), field="output_dir")

    # -- the exported model -------------------------------------------------------------------------------------------

    def push_export(
        self,
        message: str,
        *,
        write_card: Callable[[], None],
        checkpoint: Store | None,
        token: str | None,
        revision: str | None,
    ) -> Future[str] | None:
        """Queue a push of output_dir; return the future of its URL on the main process, None on others. Collective.

        `write_card` writes README.md to output_dir, on the main process. The newest committed `checkpoint` is pushed
        along when `hub_strategy` is "checkpoint". `token` and `revision` take the place of `hub_token` and
        `hub_revision`.
        """

        def queue_push() -> Future[str] | None:
            if not self._trainer.is_world_process_zero():
                return None
            write_card()  # before the digests are taken: the card is part of the content
            content = self._exported_content(checkpoint)
            return self.queue.submit(lambda: self._publish(content, message, token, revision))

        return run_on_all_ranks(self._comm(), queue_push)

    def wait_for_url(self, future: Future[str] | None) -> str:
        """Wait for a push that `push_export` queued; return its URL on every rank. Collective.

        Raises ConfigError when the target refuses the push, and StorageError when it cannot be reached.
        """
        comm = self._comm()
        url: str = comm.broadcast_json(run_on_all_ranks(comm, lambda: None if future is None else future.result()))
        return url

    def push_final_model(self, *, is_stop_requested: Callable[[], bool]) -> None:
        """At the end of training: push the model, then wait for all pushes. Collective; never raises.

        A requested stop ends the wait.
        """
        if not self._trainer.args.push_to_hub:
            return
        try:
            future = self._trainer.push_to_hub(commit_message="End of training", blocking=False)
        except TrainflowError as error:
            future = None
            _log_failed_push(error)
        if not self.queue.wait(unless=is_stop_requested):
            _log.warning("A stop was requested while a push is under way; the push may not complete.")
        elif isinstance(future, Future) and (failure := future.exception()) is not None:
            _log_failed_push(failure)

    def _publish(self, content: Content, message: str, token: str | None = None, revision: str | None = None) -> str:
        # push_to_hub is off, or the Hub could not be reached when training began.
        if self._trainer.hub_model_id is None:
            self._trainer.init_hf_repo(token)
        target, branch = str(self._trainer.hub_model_id), revision or self._trainer.args.hub_revision
        if is_folder(target):
            return FolderHub(target, branch=branch, field="hub_model_id").publish(content, message=message).url
        return self._open_repository(target, token, branch).publish(content, message=message).url

    def _exported_content(self, checkpoint: Store | None) -> Content:
        """The files of output_dir without checkpoints and hidden files: the model, and what the user put there."""
        store = self._output_store()
        files = {
            info.path: Source(store, FileEntry(info.path, info.size, store.digest(info.path)))
            for info in store.list()
            if not info.path.startswith((_CHECKPOINT, ".", "_"))
        }
        if checkpoint is not None and self._trainer.args.hub_strategy == HubStrategy.CHECKPOINT:
            return _with_checkpoint(files, checkpoint, LAST)
        return Content(files, kept=_CHECKPOINTS)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def push_checkpoint(self, url: str, *, without_weights: bool, on_begin: Callable[[], None]) -> None:
        """Call `on_begin` and queue the push, if `hub_strategy` asks for one after a save to `url`.

        Its checkpoint is protected from rotation until the push ends. `without_weights`: leave model.safetensors out,
        because the model is exported as adapters.
        """
        args, store = self._trainer.args, Store.open(url, field="checkpoint")
        name = url.rstrip("/").rpartition("/")[2]
        step = parse_step(name)
        if not args.push_to_hub or args.hub_strategy == HubStrategy.END or not self._trainer.is_world_process_zero():
            return
        if step is None:
            remedy = "Name it checkpoint-<step>."
            raise ConfigError("The folder's name is not a checkpoint's.", field="checkpoint", value=url, remedy=remedy)
        # Queued pushes would pile up on a slow connection, with outdated checkpoints.
        if self.queue.is_busy and not args.hub_always_push:
            _log.info("The previous push is not finished: the checkpoint of step %d is not pushed.", step)
            return
        try:
            content = self._checkpoint_content(store, name, without_weights=without_weights)
        except TrainflowError as error:
            _log.warning("The checkpoint of step %d is not pushed: %s", step, mask(str(error)))
            return
        in_blocks = not without_weights and store.exists(layout.SHARD_INDEX)
        on_begin()
        # Before the queue has it: rotation may run before the push's thread does.
        self._being_pushed.append(name)
        self.queue.submit(lambda: self._push_protected(store, name, content, in_blocks=in_blocks))

    def _push_protected(self, store: Store, name: str, content: Content, *, in_blocks: bool) -> str:
        """Push the checkpoint `name`, in the push's thread; `in_blocks`: `content` lacks its weights, in blocks."""
        try:
            # Rotation by another process waits as well.
            with protect_from_removal(store), tempfile.TemporaryDirectory(prefix="trainflow-push-") as folder:
                if in_blocks:  # written as the file that a model's users load
                    local, root = Store.open(folder), Store.open(store.url.rstrip("/").rpartition("/")[0])
                    with local.open_write(layout.MODEL) as writer:
                        open_checkpoint(root, name).write_model(writer)
                    content = replace(content, files={**content.files, layout.MODEL: Source(local, writer.entry)})
                return self._publish(content, f"Training in progress, step {parse_step(name)}")
        except Exception as error:
            _log_failed_push(error)
            raise
        finally:
            self._being_pushed.remove(name)

    def _checkpoint_content(self, store: Store, name: str, *, without_weights: bool) -> Content:
        """The model of a committed checkpoint with a card, and the checkpoint itself where the strategy says so."""
        strategy, commit = self._trainer.args.hub_strategy, read_commit(store, kind=KIND)
        if commit is None:
            what = "The checkpoint is not committed."
            raise ConfigError(what, field="checkpoint", value=store.url, remedy="Save it first.")
        left_out = _RESUMING | ({layout.MODEL} if without_weights else set())
        files = {
            entry.path: Source(store, entry)
            for entry in commit.files
            if entry.path not in left_out and not entry.path.startswith(("rng/", "shards/"))
        }
        self._trainer.create_model_card()
        card = self._output_store().read_bytes(README)
        content = Content(files, kept=_CHECKPOINTS)
        if strategy == HubStrategy.CHECKPOINT:
            content = _with_checkpoint(files, store, LAST)
        elif strategy == HubStrategy.ALL_CHECKPOINTS:
            content = _with_checkpoint(files, store, name)
        return Content(content.files, {**content.texts, README: card}, kept=content.kept)


def is_folder(target: str) -> bool:
    """Whether `hub_model_id` is a folder (a path or URL) and not a repository."""
    return not target.startswith(SCHEME) and ("://" in target or target.startswith(("/", "./", "../")))


def _with_checkpoint(files: Mapping[str, Source], store: Store, folder: str) -> Content:
    """`files` plus a whole committed checkpoint under `folder`, from where training can resume."""
    commit = read_commit(store, kind=KIND)
    if commit is None:
        return Content(files, kept=_CHECKPOINTS)
    whole = {f"{folder}/{entry.path}": Source(store, entry) for entry in commit.files}
    # The commit file does not list itself, and without it the folder cannot be resumed from.
    data = store.read_bytes(COMMIT)
    # last-checkpoint/ holds one checkpoint: files of the previous one must go.
    kept = (_CHECKPOINT,) if folder == LAST else _CHECKPOINTS
    return Content({**files, **whole}, {f"{folder}/{COMMIT}": data}, kept=kept)


def _log_failed_push(error: BaseException) -> None:
    _log.warning("A push failed; training continues: %s", mask(str(error)))


# -- the draft of a card ----------------------------------------------------------------------------------------------
def _source_repository(model: Any) -> str | None:
    """The repository that a transformers model was loaded from; None for a local folder, or any other model."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    # A relative folder has the form of a repository's name; one that exists here is a folder.
    found = isinstance(name, str) and bool(_REPOSITORY.fullmatch(name)) and not Path(name).exists()
    return name if found else None


def _changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments that differ from their defaults, without those that only name places."""
    defaults = TrainingArguments().to_dict()
    return {
        name: value
        for name, value in args.to_dict().items()
        if value != defaults.get(name) and name not in _PLACES and not name.startswith(("hub_", "push_"))
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
