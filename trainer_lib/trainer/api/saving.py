"""The exported model, checkpoints and the Hub. Every method may be overridden."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from trainer_lib.checkpoint.layout import SCALER
from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.hub.publisher import CardDetails
from trainer_lib.storage import Store
from trainer_lib.trainer.api.base import TrainerBase
from trainer_lib.trainer.model import models
from trainer_lib.trainer.overrides import takes

_log = logging.getLogger(__name__)


class SavingMethods(TrainerBase):
    """Saving and publishing."""

    # -- the model by itself ------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model to a folder, output_dir when not given; with `push_to_hub`, publish it. Collective.

        ``model.safetensors``, ``config.json`` and the processing class, if there are any, and ``training_args.json``:
        for a transformers model, what `from_pretrained` loads. Of a model with peft adapters, only the adapters. Rank
        0 writes, and every rank raises its error.

        An override is also called for every checkpoint, with the checkpoint's folder or, where that is remote, a local
        one of its name. What it writes is committed with the checkpoint.

        Args:
            output_dir: a local folder or any fsspec URL.
        """
        internals = self._trainflow
        # Overrides of `_save` are given a folder in every case, and some take nothing else.
        folder = str(self.args.output_dir) if output_dir is None else output_dir
        state = internals.engine.strategy.model_state(self.model_wrapped)
        given = {"state_dict": state} if takes(self._save, "state_dict") else {}
        internals.world.run_on_main_process(lambda: self._save(folder, **given))
        if self.args.push_to_hub and not _internal_call and not internals.checkpoints.is_adding_model:
            self.push_to_hub(commit_message="Model save", blocking=not self.is_in_train)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Write the model's files; `state_dict`: its whole weights by name. Runs on the main process."""
        store = Store.open(output_dir or str(self.args.output_dir), field="output_dir")
        if state_dict is None:
            state_dict = self._trainflow.engine.strategy.model_state(self.model_wrapped)
        # An adapter's weights are among the model's files.
        if not models.is_adapted(self.model):
            with store.open_write("model.safetensors") as writer:
                write_safetensors(writer, models.in_saving_order(self.model, state_dict))
        for name, data in self._trainflow.snapshots.model_files(state_dict).items():
            store.write_bytes(name, data)
        store.write_bytes("training_args.json", self.args.to_json_string().encode())
        store.sync()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any = None) -> str:
        """The folder or URL that this training writes to."""
        return str(self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None, metrics: dict[str, float] | None = None) -> None:
        """Save this step. Committed on return or, with `save_async`, copied on return and committed in the background.

        Collective. A save that is still under way is waited for. After a commit the checkpoints beyond
        `save_total_limit` are removed, except the best, the newest intact one, and those in use.

        Args:
            model: the wrapped model.
            trial: the search's trial.
            metrics: of older Trainers, which chose the best model here; `_determine_best_metric` has done it.

        Raises:
            StorageError: `max_failed_saves` saves in a row have failed; on every rank. Earlier checkpoints are intact.
        """
        self._trainflow.checkpoints.save()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of the checkpoint at a URL into `model`, the Trainer's own when not given. Collective."""
        self._trainflow.restore.load_weights(resume_from_checkpoint, model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Add files to a checkpoint: an override is called with its local folder. The library's own hold the state."""

    def _save_scaler(self, output_dir: str) -> None:
        """Add files to a checkpoint: an override is called with its local folder."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Add files to a checkpoint: an override is called with its local folder."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore optimizer and schedule from the checkpoint at this URL. Collective.

        An override that does nothing resumes with a new optimizer, at the saved position.
        """
        if checkpoint is not None:
            self._trainflow.restore.load_optimizer(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restore the loss scale of fp16 from the checkpoint at this URL."""
        if checkpoint is not None:
            loaded = self._trainflow.restore.open(checkpoint)
            with loaded.treat_errors_as_damage(SCALER):
                self._trainflow.engine.precision.load_scaler_state(loaded.scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's random generators from the checkpoint at this URL, right before the first step."""
        if checkpoint is not None:
            self._trainflow.restore.load_random_numbers(checkpoint)

    def _load_best_model(self) -> None:
        """Load the best checkpoint's weights into the model. Collective."""
        self._trainflow.restore.load_best()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Log the missing and unexpected keys that `load_state_dict` has returned to an override."""
        model: Any = self.model
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        if ignored and ignored == set(load_result.missing_keys):
            model.tie_weights()
        elif load_result.missing_keys:
            _log.warning("The checkpoint lacks these weights of the model: %s.", load_result.missing_keys)
        if load_result.unexpected_keys:
            _log.warning("The checkpoint has weights that the model lacks: %s.", load_result.unexpected_keys)

    def _load_callback_state(self) -> None:
        """Do nothing: resuming has restored the callbacks."""

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Do nothing: the checkpoints beyond `save_total_limit` are removed after a commit."""

    # -- the Hub ------------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository of `hub_model_id` (default: the name of output_dir), on the main process.

        Raises:
            ConfigError: the name or the token is refused.
            StorageError: the Hub cannot be reached.
        """
        if self.is_world_process_zero():
            self.hub_model_id = self._trainflow.publisher.create_target(token)

    def init_git_repo(self, at_init: bool = False) -> None:
        """Old name of `init_hf_repo`."""
        self.init_hf_repo()

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
        """Write a draft of the model card, README.md in output_dir, on the main process.

        Args:
            language, license, tags, tasks: as the Hub names them. Tags, licence, language and library of a card that
                exists are kept unless given here; without a licence, that of `finetuned_from` is used.
            model_name: the title; default: the repository's name.
            finetuned_from: the base model; default: the repository that the given model was loaded from.
            dataset_tags: identifiers of the data on the Hub.
            dataset: names of the data for people.
            dataset_args: configurations of the data.
        """
        if self.is_world_process_zero():
            details = CardDetails(
                language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
            )
            self._trainflow.publisher.write_card(details)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> str | Future[str] | None:
        """Export the model to output_dir with its card, and publish that folder without its checkpoints. Collective.

        A revision is made only when the content differs from the newest revision.

        Args:
            commit_message: message of the revision.
            blocking: wait for the upload; otherwise a thread of the main process uploads after the return.
            token, revision: used in place of the arguments' `hub_token` and `hub_revision`.
            **kwargs: passed to `create_model_card`.

        Returns:
            The revision's URL when blocking; otherwise a `Future` of it on the main process, and None on the others.

        Raises:
            ConfigError: the target refuses the push.
            StorageError: it cannot be reached. Without `blocking` the future raises both.
        """
        internals = self._trainflow
        internals.events.fire("on_push_begin")
        self.save_model(_internal_call=True)
        future = internals.publisher.push_export(
            commit_message or "End of training",
            write_card=lambda: self.create_model_card(**kwargs),
            checkpoint=internals.checkpoints.newest_committed(),
            token=token,
            revision=revision,
        )
        return internals.publisher.wait_for_url(future) if blocking else future

    def _finish_current_push(self) -> None:
        """Wait for the pushes in the background."""
        if (push := self.push_in_progress) is not None:
            push.wait_until_done()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the committed checkpoint at this URL as `hub_strategy` asks, in the background."""
        internals = self._trainflow
        internals.publisher.push_checkpoint(
            checkpoint_folder,
            without_weights=models.is_adapted(self.model),
            on_begin=lambda: internals.events.fire("on_push_begin"),
        )
