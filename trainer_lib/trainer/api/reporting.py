"""Logs, metrics files, counters. Every method may be overridden."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.outputs import speed_metrics
from trainer_lib.data.loading.items import MAPPINGS, batch_size_of
from trainer_lib.distributed import communicator as distributed
from trainer_lib.evaluation.metrics import to_json_value
from trainer_lib.storage import Store
from trainer_lib.trainer.api.base import TrainerBase
from trainer_lib.trainer.history import json_number
from trainer_lib.trainer.model import models

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class ReportingMethods(TrainerBase):
    """Everything that is shown, logged and written about a run."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add an entry to the log history, and pass it to every callback (trackers, progress).

        Args:
            logs: names and figures; epoch and counted tokens are added to it. Tensors and arrays become numbers: those
                on a device are waited for.
            start_time: when training started, in seconds since the epoch of `time.time`. Where tokens are counted, the
                entry then has the run time in seconds and the tokens per second as well.
        """
        entry = {name: to_json_value(value) for name, value in logs.items()}
        if self.state.epoch is not None:
            entry["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            entry["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                here = self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
                entry |= speed_metrics("train", start_time, num_tokens=here)
        # In place, as in the reference: the caller's dictionary has the epoch afterwards.
        logs.update(entry)
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self._trainflow.events.fire("on_log", logs)

    @staticmethod
    def metrics_format(metrics: dict[str, float]) -> dict[str, Any]:
        """Metrics for reading: memory in MB, run times as h:mm:ss, floating-point operations in GF, floats rounded."""
        shown: dict[str, Any] = {}
        for name, given in metrics.items():
            value = to_json_value(given)
            if "_mem_" in name:
                shown[name] = f"{int(value) >> 20}MB"
            elif name.endswith("_runtime"):
                seconds, hundredths = divmod(round(value * 100), 100)
                hours, minutes = seconds // 3600, seconds // 60 % 60
                shown[name] = f"{hours}:{minutes:02d}:{seconds % 60:02d}.{hundredths:02d}"
            elif name == "total_flos":
                shown[name] = f"{int(value) >> 30}GF"  # units of 2**30, as transformers prints them
            else:
                shown[name] = round(value, 4) if isinstance(value, float) else value
        return shown

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics as an aligned table, on the main process."""
        if not self.is_world_process_zero():
            return
        shown = self.metrics_format(metrics)
        width = max((len(name) for name in shown), default=0)
        value_width = max((len(str(value)) for value in shown.values()), default=0)
        lines = [f"  {name:{width}} = {shown[name]!s:>{value_width}}" for name in sorted(shown)]
        sys.stdout.write("\n".join([f"***** {split} metrics *****", *lines]) + "\n")

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write metrics to ``<split>_results.json`` in output_dir, and merge them into ``all_results.json``."""
        if not self.is_world_process_zero():
            return
        store = Store.open(str(self.args.output_dir), field="output_dir")
        store.write_bytes(f"{split}_results.json", _as_json(metrics))
        if combined:
            present = store.read_if_exists("all_results.json", limit=1 << 24)
            everything = parse_json(present) if present else {}
            store.write_bytes("all_results.json", _as_json({**everything, **metrics}))

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to output_dir, on the main process."""
        self.store_flos()
        if self.is_world_process_zero():
            store = Store.open(str(self.args.output_dir), field="output_dir")
            store.write_bytes("trainer_state.json", self.state.to_json_string().encode())

    @property
    def _globalstep_last_logged(self) -> int:
        """The step of the last log. An override that logs by itself sets it: the next log starts there."""
        run = self._trainflow.run
        return self.state.global_step - (0 if run is None else run.history.steps_since_log)

    @_globalstep_last_logged.setter
    def _globalstep_last_logged(self, step: int) -> None:
        internals = getattr(self, "_trainflow", None)  # a subclass may set it before the Trainer is built
        if internals is not None and internals.run is not None and step == self.state.global_step:
            internals.run.history.forget_logged()

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Gather tensors ``[...]`` in a nested structure from all ranks, as Trainers before transformers 5 did."""
        return None if tensors is None else self.accelerator.gather(tensors)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Add the input tokens of a micro-batch, or of a list of them, to the state, if they are counted. Collective.

        An override is called with each micro-batch; the library's own method with all of a step.
        """
        internals, run = self._trainflow, self._trainflow.run
        if self.args.include_num_input_tokens_seen == "no" and not self.args.include_tokens_per_second:
            return
        samples = inputs if isinstance(inputs, list) else [inputs]
        if run is not None and len(run.weights.items) == len(samples):  # an override is called batch by batch
            # A dummy batch has no target items, and its tokens are not training data.
            samples = [batch for batch, items in zip(samples, run.weights.items, strict=True) if items]
        total = sum(internals.counters.input_tokens(batch) for batch in samples)
        self.state.num_input_tokens_seen += distributed.sum_over_data(internals.world.comm, [total])[0]

    def floating_point_ops(self, inputs: Any) -> int:
        """Floating-point operations of a forward and backward pass over a batch of tensors ``[batch, ...]``.

        The model's own count, else 6 per parameter (without embeddings) and token; per sample where there are no
        tokens. Source: Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1: 2 for the forward
        pass, 4 for the backward pass.
        """
        if not isinstance(inputs, Mapping):
            return 0
        facts = self._trainflow.facts
        if facts.own_flops is not None:
            return int(facts.own_flops(inputs))
        main = inputs.get(facts.main_input)
        # Integers are tokens. For floats such as pixels, transformers counts every element; other models count samples.
        has_items = isinstance(main, torch.Tensor) and not main.is_floating_point()
        if isinstance(main, torch.Tensor) and (has_items or models.is_transformers(self.model)):
            return facts.flops_per_item * main.numel()
        return facts.flops_per_item * (batch_size_of(inputs) or 0)

    def store_flos(self) -> None:
        """Add the floating-point operations that all ranks have counted to the state. Collective."""
        # As whole numbers: a float has no digits left for one batch after a long training.
        self.state.total_flos += distributed.sum_over_data(self._trainflow.world.comm, [int(self.current_flos)])[0]
        self._trainflow.counters.reset_flos()

    def end(self) -> None:
        """Finish the trackers and leave the process group; call it once, after everything that needs other ranks."""
        self._trainflow.events.close_trackers("FINISHED")
        distributed.shutdown()


def _as_json(metrics: Mapping[str, Any]) -> bytes:
    plain = {name: to_json_value(value) for name, value in metrics.items()}
    finite = {name: json_number(value) if isinstance(value, float) else value for name, value in plain.items()}
    return (json.dumps(finite, indent=4, sort_keys=True) + "\n").encode()


class Counters:
    """Owner of the Trainer's `current_flos`, the operations of this rank that are not in the state yet."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self._warned_of_tokens = False
        self.own_tokens = 0
        """Tokens of the batches of this rank's training, padding included; 0 where a batch has none."""
        self.reset_flos()

    def reset_flos(self) -> None:
        """Forget the operations that are not in the state yet."""
        self._trainer.current_flos = 0.0

    def count_flos(self, batch: Any) -> None:
        """Add the operations of a forward and backward pass over a batch."""
        trainer = self._trainer
        trainer.current_flos += float(trainer.floating_point_ops(batch))
        main = batch.get(self._internals.facts.main_input) if isinstance(batch, MAPPINGS) else None
        if isinstance(main, torch.Tensor) and not main.is_floating_point():
            self.own_tokens += main.numel()

    def input_tokens(self, batch: Any) -> int:
        """Tokens of a batch ``[batch, sequence]``, counted on the host before it goes to the device.

        With "non_padding", tokens that the attention mask hides are left out, or without a mask the padding tokens.
        """
        name = self._internals.facts.main_input
        tokens = batch.get(name) if isinstance(batch, Mapping) else None
        if not isinstance(tokens, torch.Tensor):
            if not self._warned_of_tokens:
                self._warned_of_tokens = True
                _log.warning("No tokens are counted: batches have no %r (give the model a main_input_name).", name)
            return 0
        if self._trainer.args.include_num_input_tokens_seen != "non_padding":
            return tokens.numel()
        mask, padding = batch.get("attention_mask"), getattr(self._trainer.processing_class, "pad_token_id", None)
        if isinstance(mask, torch.Tensor):
            return int(mask.sum())
        return tokens.numel() if padding is None else int((tokens != padding).sum())
