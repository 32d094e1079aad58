"""The Trainer's Hub methods. The `Publisher` does the work, and calls these methods, which a subclass may replace."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from trainer_lib.checkpoint.layout import checkpoint_name
from trainer_lib.hub.draft import CardDetails
from trainer_lib.trainer import models
from trainer_lib.trainer.saving import SavingMixin


class PublishingMixin(SavingMixin):
    """The Hub methods. Each may be overridden."""

    hub_model_id: str | None = None

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repository of `hub_model_id` (default: the name of output_dir), on the main process.

        Raises:
            ConfigError: the name or the token is refused. StorageError: the Hub cannot be reached.
        """
        if self.is_world_process_zero():
            self.hub_model_id = self._trainflow_publisher.create_target(token)

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
            self._trainflow_publisher.write_card(details)

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
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
            ConfigError: the target refuses the push. StorageError: it cannot be reached. Without `blocking` the future
                raises them.
        """
        self.control = self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        run, publisher = self._run, self._trainflow_publisher
        committed = run is not None and run.saved_step >= 0
        future = publisher.push_export(
            commit_message or "End of training",
            write_card=lambda: self.create_model_card(**kwargs),
            checkpoint=self._checkpoint_root().child(checkpoint_name(run.saved_step)) if run and committed else None,
            token=token,
            revision=revision,
        )
        return publisher.wait_for_url(future) if blocking else future

    @override
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the committed checkpoint at this URL as `hub_strategy` says, in the background."""
        publisher = self._trainflow_publisher
        push = publisher.prepare_checkpoint_push(checkpoint_folder, without_weights=models.is_adapted(self.model))
        if push is not None:
            self.control = self.callback_handler.on_push_begin(self.args, self.state, self.control)
            publisher.queue_checkpoint(push)
