"""Logs, metrics files, counters. Every method may be overridden."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from trainer_lib import distributed
from trainer_lib.storage import Store
from trainer_lib.trainer.base import TrainerBase


class ReportingMethods(TrainerBase):
    """What is shown, logged and written about a run."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add an entry to the log history, and pass it to every callback (trackers, progress)."""
        entry = dict(logs)
        if self.state.epoch is not None:
            entry["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            entry["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        # In place, as in the reference: the caller's dictionary has the epoch afterwards.
        logs.update(entry)
        self.state.log_history.append({**entry, "step": self.state.global_step})
        self._trainflow.events.fire("on_log", logs)

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
            everything = json.loads(present) if present else {}
            store.write_bytes("all_results.json", _as_json({**everything, **metrics}))

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to output_dir, on the main process."""
        self.store_flos()
        if self.is_world_process_zero():
            store = Store.open(str(self.args.output_dir), field="output_dir")
            store.write_bytes("trainer_state.json", self.state.to_json_string().encode())

    def _track_num_input_tokens(self, samples: list[Any]) -> None:
        """Add the input tokens of a step's micro-batches to the state, if they are counted. Collective."""
        self._trainflow.counters.track_tokens(samples)

    def floating_point_ops(self, inputs: Any) -> int:
        """Floating-point operations of a forward and backward pass over a batch of tensors ``[batch, ...]``.

        The model's own count, else 6 per parameter (without embeddings) and token; per sample where there are no
        tokens. Source: Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1: 2 for the forward
        pass, 4 for the backward pass.
        """
        return self._trainflow.counters.floating_point_ops(inputs)

    def store_flos(self) -> None:
        """Add the floating-point operations that all ranks have counted to the state. Collective."""
        self._trainflow.counters.store_flos()

    def end(self) -> None:
        """Finish the trackers and leave the process group; call it once, after everything that needs other ranks."""
        self._trainflow.events.close_trackers("FINISHED")
        distributed.shutdown()


def _as_json(metrics: Mapping[str, Any]) -> bytes:
    # JSON has no number for NaN and infinity: they are written as text.
    finite = {
        name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
        for name, value in metrics.items()
    }
    return (json.dumps(finite, indent=4, sort_keys=True) + "\n").encode()
