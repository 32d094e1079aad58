"""Publishing from the Trainer: the model card, `push_to_hub`, and the four strategies of pushing while training.

::

    on_save        -> every_save: the checkpoint's model; checkpoint: and all of it as last-checkpoint/;
                      all_checkpoints: and all of it as checkpoint-<step>/       (in the background)
    end of train() -> the final model, with its metrics on the card (all strategies); then wait for what is under way

A push reads files that are committed already, in a thread of its own: saving never waits for the Hub. A push that is
still under way when the next is due makes that one be left out, unless `hub_always_push` queues it. No failure of a
push that training started ends training. `hub_model_id` is a repository, or a folder on any store.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from trainer_lib.agreement import run_on_all_ranks
from trainer_lib.arguments import HubStrategy, TrainingArguments
from trainer_lib.checkpoint import writer
from trainer_lib.checkpoint.catalogue import KIND, checkpoint_name, step_of
from trainer_lib.checkpoint.sharded import INDEX
from trainer_lib.commit import COMMIT, read_commit
from trainer_lib.errors import ConfigError, StorageError, TrainflowError
from trainer_lib.hub.background import Background
from trainer_lib.hub.base import Content, Hub, Source
from trainer_lib.hub.card import Card, card_metadata, model_card, tidy_metrics
from trainer_lib.hub.folder import FolderHub
from trainer_lib.hub.transport import SCHEME
from trainer_lib.locks.readers import reading
from trainer_lib.storage import FileEntry, Store
from trainer_lib.trackers.params import mask
from trainer_lib.trainer import models
from trainer_lib.trainer.saving import PREFIX, SavingMixin

if TYPE_CHECKING:  # asked for when a repository is pushed to: it takes the Hub's client along
    from trainer_lib.hub.huggingface import HuggingFaceHub

_log = logging.getLogger(__name__)
README = "README.md"
LAST = "last-checkpoint"
_CHECKPOINTS = (f"{PREFIX}-", f"{LAST}/")  # kept on the Hub by a revision that has none
_REPO = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_RESUMING = frozenset(
    (writer.OPTIMIZER_TENSORS, writer.OPTIMIZER, writer.SCHEDULER, writer.SCALER, writer.DATA, writer.TRAINER_STATE)
)


def is_folder(target: str) -> bool:
    """Whether `hub_model_id` is a folder (a path or URL), and not a repository."""
    return not target.startswith(SCHEME) and ("://" in target or target.startswith(("/", "./", "../")))


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _tell(error: BaseException) -> None:
    _log.warning("A push of training failed, training goes on: %s", mask(str(error)))


class HubMixin(SavingMixin):
    """The Hub methods. Each may be overridden."""

    hub_model_id: str | None = None

    # -- the target ---------------------------------------------------------------------------------------------------

    def _set_up_hub(self) -> None:
        """With `push_to_hub`: see that the target takes our files, before anything is spent. Collective.

        Raises ConfigError for a bad name or token. A Hub that is out of reach is asked again at the first push.
        """
        self._pushes = Background("hub push")
        self._base_licence: tuple[str, str | None] | None = None
        if not self.args.push_to_hub:
            return
        try:
            run_on_all_ranks(self.comm, self.init_hf_repo)
        except StorageError as error:
            _log.warning("The Hub could not be asked; training goes on and pushes later: %s", mask(str(error)))

    def init_hf_repo(self, token: str | None = None) -> None:
        """Make the repository of `hub_model_id` (default: the name of output_dir) ready; on the main process."""
        if not self.is_world_process_zero():
            return
        target = self._hub_target()
        if is_folder(target):
            Store.open(target, field="hub_model_id").ensure_writable(field="hub_model_id")
            self.hub_model_id = target
            return
        self.hub_model_id = self._huggingface(target, token).create()

    def init_git_repo(self, at_init: bool = False) -> None:
        """Old name of `init_hf_repo`."""
        self.init_hf_repo()

    def _hub_target(self) -> str:
        given = self.args.hub_model_id
        target = given or PurePosixPath(str(self.args.output_dir).rstrip("/")).name
        if not is_folder(target) and not _REPO.fullmatch(target.removeprefix(SCHEME)):
            raise ConfigError(
                "is neither a repository's name nor a folder.",
                field="hub_model_id" if given else "output_dir",
                value=target,
                remedy='Give hub_model_id="owner/name", or the URL of a folder.',
            )
        return target.removeprefix(SCHEME)

    def _hub(self, token: str | None, revision: str | None) -> Hub:
        if self.hub_model_id is None:
            self.init_hf_repo(token)
        target, branch = str(self.hub_model_id), revision or self.args.hub_revision
        if is_folder(target):
            return FolderHub(target, branch=branch, field="hub_model_id")
        return self._huggingface(target, token, branch)

    def _huggingface(self, target: str, token: str | None, branch: str | None = None) -> HuggingFaceHub:
        from trainer_lib.hub.huggingface import HuggingFaceHub

        private, given = self.args.hub_private_repo, token or self.args.hub_token
        return HuggingFaceHub(target, branch=branch, private=private, field="hub_model_id", token=given)

    # -- the card -----------------------------------------------------------------------------------------------------

    def create_model_card(
        self,
        language: str | Sequence[str] | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | Sequence[str] | None = None,
        dataset_tags: str | Sequence[str] | None = None,
        dataset: str | Sequence[str] | None = None,
        dataset_args: str | Sequence[str] | None = None,
    ) -> None:
        """Write a draft of the model card, README.md in output_dir, from what the Trainer knows; on the main process.

        Args:
            language, license, tags, tasks: as the Hub names them. Tags, licence, language and library of a card that is
                there already are kept, unless others are given; the licence is by default that of `finetuned_from`.
            model_name: the title; the repository's name when not given.
            finetuned_from: the model this one was made from; the repository the given model came from, if it did.
            dataset_tags: identifiers of the data on the Hub. dataset: its names for people. dataset_args: its
                configurations.
        """
        if not self.is_world_process_zero():
            return
        store = self._output_store()
        present = card_metadata((store.read_if_exists(README, limit=1 << 20) or b"").decode(errors="replace"))
        base = finetuned_from or self._came_from() or _text(present.get("base_model"))
        own = getattr(self.model, "model_tags", None)
        every = [*_listed(present.get("tags")), *_listed(tags), *_listed(own)]
        evaluated = [entry for entry in self.state.log_history if any(name.startswith("eval_") for name in entry)]
        measured = {name: value for name, value in (evaluated or [{}])[-1].items() if name.startswith("eval_")}
        card = Card(
            title=model_name or PurePosixPath(str(self.hub_model_id or self._hub_target()).rstrip("/")).name,
            description="Draft of a card, written by the Trainer: complete it.",
            license=license or _text(present.get("license")) or self._licence_of(base),
            tags=every,
            base_model=base,
            metrics=tidy_metrics({"eval": measured}),
            arguments=self._arguments_set(),
            facts={"optimizer steps": self.state.global_step, "epochs": round(float(self.state.epoch), 2)},
            library=_text(present.get("library_name")) or "trainflow",
            language=_listed(language) or _listed(present.get("language")),
            tasks=_listed(tasks) or _listed(present.get("pipeline_tag")),
            datasets=_listed(dataset_tags) or _listed(present.get("datasets")),
            dataset_names=_listed(dataset),
            dataset_args=_listed(dataset_args),
        )
        store.write_bytes(README, model_card(card).encode())

    def _came_from(self) -> str | None:
        """The repository that a transformers model was loaded from; None for a local folder, or no such model."""
        name = getattr(getattr(self.model, "config", None), "_name_or_path", None)
        found = isinstance(name, str) and bool(_REPO.fullmatch(name)) and not Path(name).exists()
        return name if found else None

    def _licence_of(self, base: str | None) -> str | None:
        """Asked once: cards are written at every push, and none of them should wait for the Hub again."""
        if base is None or is_folder(self._hub_target()):
            return None
        if self._base_licence is None or self._base_licence[0] != base:
            from trainer_lib.hub.huggingface import licence_of

            self._base_licence = (base, licence_of(base, token=self.args.hub_token))
        return self._base_licence[1]

    def _arguments_set(self) -> dict[str, Any]:
        """The arguments that differ from their defaults, without those that only say where things are."""
        fresh = TrainingArguments().to_dict()
        hidden = ("output_dir", "logging_dir", "resume_from_checkpoint", "local_rank")
        return {
            name: value
            for name, value in self.args.to_dict().items()
            if value != fresh.get(name) and name not in hidden and not name.startswith(("hub_", "push_"))
        }

    # -- pushing ------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See `SavingMixin.save_model`. With `push_to_hub`, a call of the user's own is followed by a push."""
        super().save_model(output_dir, _internal_call=_internal_call)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", blocking=not self.is_in_train)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> str | Future[str] | None:
        """Export the model to output_dir with its card, and publish what is there (checkpoints left out).

        Publishing what the newest revision already holds makes none. Collective.

        Args:
            commit_message: of the revision.
            blocking: return when it is done; else at once, while a thread of the main process uploads.
            token, revision: instead of the arguments' `hub_token`, `hub_revision`.
            **kwargs: for `create_model_card`.

        Returns:
            The revision's URL when blocking; else a `Future` of it on the main process, and None on the others.

        Raises:
            ConfigError: the target refuses us; StorageError: it is out of reach. Not blocking: the future has it.
        """
        self.control = self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        future = run_on_all_ranks(self.comm, lambda: self._push_export(commit_message, token, revision, kwargs))
        if not blocking:
            return future
        result: str = self.comm.broadcast_json(
            run_on_all_ranks(self.comm, lambda: None if future is None else future.result())
        )
        return result

    def _push_export(
        self, message: str | None, token: str | None, revision: str | None, card: dict[str, Any]
    ) -> Future[str] | None:
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**card)
        content = self._exported_content()
        return self._pushes.submit(lambda: self._publish(content, message or "End of training", token, revision))

    def _publish(self, content: Content, message: str, token: str | None = None, revision: str | None = None) -> str:
        return self._hub(token, revision).publish(content, message=message).url

    def _exported_content(self) -> Content:
        """What is in output_dir: the model and the user's own files; no checkpoints, nothing hidden."""
        store = self._output_store()
        files = {
            info.path: Source(store, FileEntry(info.path, info.size, store.digest(info.path)))
            for info in store.list()
            if not info.path.startswith((f"{PREFIX}-", ".", "_"))
        }
        newest = self._newest_pushed()
        if newest is not None and self.args.hub_strategy == HubStrategy.CHECKPOINT:
            return self._with_checkpoint(files, newest, LAST)
        return Content(files, kept=_CHECKPOINTS)

    def _newest_pushed(self) -> str | None:
        run = self._run
        return None if run is None or run.saved_step < 0 else checkpoint_name(run.saved_step)

    def _with_checkpoint(self, files: dict[str, Source], name: str, folder: str) -> Content:
        """`files`, and the whole of a committed checkpoint under `folder`: it can be resumed from there."""
        store = self._checkpoint_root().child(name)
        commit = read_commit(store, kind=KIND)
        if commit is None:
            return Content(files, kept=_CHECKPOINTS)
        whole = {f"{folder}/{entry.path}": Source(store, entry) for entry in commit.files}
        data = store.read_bytes(COMMIT)
        kept = (f"{PREFIX}-",) if folder == LAST else _CHECKPOINTS
        return Content({**files, **whole}, {f"{folder}/{COMMIT}": data}, kept=kept)

    # -- while training -----------------------------------------------------------------------------------------------

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """After a save: push what `hub_strategy` says from the committed files, in the background."""
        args, name = self.args, checkpoint_folder.rstrip("/").rpartition("/")[2]
        step = step_of(name)
        if not args.push_to_hub or args.hub_strategy == HubStrategy.END or not self.is_world_process_zero():
            return
        if self._pushes.busy and not args.hub_always_push:
            _log.info("The push before is not finished: the checkpoint of step %d is not pushed.", step)
            return
        try:
            content = self._checkpoint_content(name)
        except TrainflowError as error:
            _log.warning("The checkpoint of step %d is not pushed: %s", step, mask(str(error)))
            return
        self.control = self.callback_handler.on_push_begin(self.args, self.state, self.control)
        message = f"Training in progress, step {step}"
        self._being_pushed.append(name)
        self._pushes.submit(lambda: self._push_checkpoint(content, message, name))

    def _push_checkpoint(self, content: Content, message: str, name: str) -> str:
        """In the push's thread: a failure is told, and the checkpoint may go afterwards."""
        try:
            with reading(self._checkpoint_root().child(name)):
                return self._publish(content, message)
        except Exception as error:
            _tell(error)
            raise
        finally:
            self._being_pushed.remove(name)

    def _checkpoint_content(self, name: str) -> Content:
        """The model in a committed checkpoint, with a card; and the checkpoint itself, as the strategy says."""
        store = self._checkpoint_root().child(name)
        commit = read_commit(store, kind=KIND)
        if commit is None:
            raise ConfigError("is not committed.", field="checkpoint", value=store.url, remedy="Save it first.")
        if any(entry.path == INDEX for entry in commit.files):
            raise ConfigError(
                "holds the model in parts, one of each process, which nobody loads from a hub.",
                field="hub_strategy",
                value=str(self.args.hub_strategy),
                remedy='Give hub_strategy="end", or state_dict_type FULL_STATE_DICT in fsdp_config.',
            )
        left_out = _RESUMING | ({writer.MODEL} if models.is_adapted(self.model) else set())
        files = {
            entry.path: Source(store, entry)
            for entry in commit.files
            if entry.path not in left_out and not entry.path.startswith("rng/")
        }
        self.create_model_card()
        card = self._output_store().read_bytes(README)
        content = Content(files, kept=_CHECKPOINTS)
        if self.args.hub_strategy == HubStrategy.CHECKPOINT:
            content = self._with_checkpoint(files, name, LAST)
        elif self.args.hub_strategy == HubStrategy.ALL_CHECKPOINTS:
            content = self._with_checkpoint(files, name, name)
        return Content(content.files, {**content.texts, README: card}, kept=content.kept)

    def _push_at_end(self) -> None:
        """The final model; then wait for everything under way, unless asked to stop. Collective; never raises."""
        if not self.args.push_to_hub:
            return
        try:
            future = self.push_to_hub(commit_message="End of training", blocking=False)
        except TrainflowError as error:
            future = None
            _tell(error)
        stop = self._stop
        if not self._pushes.wait(unless=lambda: stop is not None and stop.requested):
            _log.warning("Asked to stop: a push is still under way and may not arrive.")
        elif isinstance(future, Future) and (failure := future.exception()) is not None:
            _tell(failure)
