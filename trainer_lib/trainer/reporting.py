"""What is shown, logged and written about a run. Every public method may be overridden."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from trainer_lib import distributed
from trainer_lib.data.items import batch_size_of
from trainer_lib.storage import Store
from trainer_lib.trackers.callback import TrackingCallback
from trainer_lib.trainer import models
from trainer_lib.trainer.base import TrainerBase

_log = logging.getLogger(__name__)


class ReportingMixin(TrainerBase):
    """Logs, metrics files, counters."""

    _said_no_tokens = False

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add an entry to the history and hand it to every callback (trackers, progress)."""
        entry = dict(logs)
        if self.state.epoch is not None:
            entry["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            entry["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        logs.update(entry)
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def _log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Call `log` as its (possibly older) override takes it."""
        if self._log_takes_start and start_time is not None:
            self.log(logs, start_time)
        else:
            self.log(logs)

    @staticmethod
    def metrics_format(metrics: dict[str, float]) -> dict[str, Any]:
        """Metrics for reading: memory in MB, run times as h:mm:ss, floating-point operations in GF, floats rounded."""
        shown: dict[str, Any] = {}
        for name, value in metrics.items():
            if "_mem_" in name:
                shown[name] = f"{int(value) >> 20}MB"
            elif name.endswith("_runtime"):
                seconds, hundredths = divmod(round(value * 100), 100)
                hours, minutes = seconds // 3600, seconds // 60 % 60
                shown[name] = f"{hours}:{minutes:02d}:{seconds % 60:02d}.{hundredths:02d}"
            elif name == "total_flos":
                shown[name] = f"{int(value) >> 30}GF"
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
        store = self._output_store()
        store.write_bytes(f"{split}_results.json", _as_json(metrics))
        if combined:
            present = store.read_if_exists("all_results.json", limit=1 << 24)
            everything = json.loads(present) if present else {}
            store.write_bytes("all_results.json", _as_json({**everything, **metrics}))

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to output_dir, on the main process."""
        self.store_flos()
        if self.is_world_process_zero():
            self._output_store().write_bytes("trainer_state.json", self.state.to_json_string().encode())

    def _output_store(self) -> Store:
        return Store.open(str(self.args.output_dir), field="output_dir")

    def _input_tokens(self, batch: Any) -> int:
        """Tokens fed to the model by a batch; only those that are no padding when the arguments say so.

        Padding is what the attention mask hides, else the processing class's padding token; told apart on the host,
        where batches are counted before they go to the device.
        """
        name = self._main_input
        tokens = batch.get(name) if isinstance(batch, Mapping) else None
        if not isinstance(tokens, torch.Tensor):
            if not self._said_no_tokens:
                self._said_no_tokens = True
                _log.warning("No tokens are counted: batches have no %r (give the model a main_input_name).", name)
            return 0
        if self.args.include_num_input_tokens_seen != "non_padding":
            return tokens.numel()
        mask, padding = batch.get("attention_mask"), getattr(self.processing_class, "pad_token_id", None)
        if isinstance(mask, torch.Tensor):
            return int(mask.sum())
        return tokens.numel() if padding is None else int((tokens != padding).sum())

    def floating_point_ops(self, inputs: Any) -> int:
        """Floating-point operations of a forward and backward pass over a batch, as the model itself says, else 6 per
        parameter (embeddings left out) and token, or sample where there are no tokens.

        Source: Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1: 2 forward, 4 backward.
        """
        if not isinstance(inputs, Mapping):
            return 0
        if callable(self._counts_flos):
            return int(self._counts_flos(inputs))
        main = inputs.get(self._main_input)
        if isinstance(main, torch.Tensor) and (not main.is_floating_point() or models.is_transformers(self.model)):
            return self._flos_per_item * main.numel()
        return self._flos_per_item * (batch_size_of(inputs) or 0)

    def _close_trackers(self, status: str) -> None:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TrackingCallback):
                callback.close(status)

    def end(self) -> None:
        """Finish the trackers and leave the process group; call it once, after everything that needs other ranks."""
        self._close_trackers("FINISHED")
        distributed.shutdown()

    def store_flos(self) -> None:
        """Add what all ranks have counted to the state; collective."""
        self.state.total_flos += self.comm.sum_ints([int(self.current_flos)])[0]
        self.current_flos = 0.0


def _as_json(metrics: Mapping[str, Any]) -> bytes:
    finite = {
        name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
        for name, value in metrics.items()
    }
    return (json.dumps(finite, indent=4, sort_keys=True) + "\n").encode()
