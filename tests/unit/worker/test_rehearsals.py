"""The verbs *estimate* and *probe*: fake tensors count what real ones take, and a few real steps are timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tiny
from tests.support.launched import request
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.footprint import Estimate, Probe
from trainer_lib.requests import PreparedData
from trainer_lib.storage import Store

ARGS = {**tiny.ARGS, "per_device_train_batch_size": 4}
PARAMETERS = 6 * 16 + 16 + 16 * 2 + 2


def ask(folder: Path, data: PreparedData, verb: str, recipe: str = tiny.RECIPE, **fields: Any) -> Any:
    given = {"data": data, "model": {}, "args": ARGS, **fields}
    return tiny.run(request(folder, recipe, verb, output=str(folder / "out"), **given), kind="in_process")


@pytest.fixture(scope="module")
def estimate(tmp_path_factory: pytest.TempPathFactory, prepared_data: PreparedData) -> Estimate:
    found = ask(tmp_path_factory.mktemp("estimate"), prepared_data, "estimate", eval_split="test")
    assert isinstance(found, Estimate)
    return found


def test_the_estimate_counts_every_byte_of_weights_gradients_and_optimizer(estimate: Estimate) -> None:
    size = estimate.size
    assert (size.parameters, size.trainable, size.parameter_bytes) == (PARAMETERS, PARAMETERS, 4 * PARAMETERS)
    assert size.gradient_bytes == 4 * PARAMETERS
    # Two moments of each element and a step of each of four tensors.
    assert size.optimizer_bytes == 2 * 4 * PARAMETERS + 4 * 4
    assert size.stored_bytes == 4 * PARAMETERS
    assert (estimate.device, estimate.notes, estimate.tokens_per_sample) == ("cpu", (), None)
    assert estimate.process_bytes > 50e6


def test_the_estimate_knows_what_a_micro_batch_leaves_in_memory(estimate: Estimate) -> None:
    # At least the layers' outputs of four rows: 16 hidden values twice, and 2 logits.
    assert estimate.size.activation_bytes is not None
    assert 4 * 4 * (16 + 16 + 2) <= estimate.size.activation_bytes < 20_000
    assert estimate.size.evaluation_bytes is not None


def test_a_model_that_reads_its_values_is_sized_all_the_same(tmp_path: Path, prepared_data: PreparedData) -> None:
    reading = tiny.RECIPE.replace("        logits = self.layers(x)", "        float(x.sum()); logits = self.layers(x)")
    found = ask(tmp_path, prepared_data, "estimate", reading)
    assert found.size.parameters == PARAMETERS
    assert (found.size.activation_bytes, found.size.optimizer_bytes) == (None, None)
    [note] = found.notes
    assert note.startswith("The memory of a step could not be worked out without values (")
    assert note.endswith("--probe measures it.")


def test_a_model_that_needs_values_to_be_built_is_built_with_them(tmp_path: Path, prepared_data: PreparedData) -> None:
    needing = tiny.RECIPE.replace("    return Net(", "    torch.zeros(3)[1].item()\n    return Net(")
    found = ask(tmp_path, prepared_data, "estimate", needing)
    assert found.notes == ("The model was built with its weights: its code does not work without values.",)
    assert found.size.activation_bytes is not None


def test_the_probe_times_steps_an_evaluation_and_a_save(tmp_path: Path, prepared_data: PreparedData) -> None:
    steps = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    found = ask(tmp_path, prepared_data, "probe", args={**ARGS, **steps}, eval_split="test", rows=10)
    assert isinstance(found, Probe)
    assert found.steps == 2
    assert found.step_s > 0
    assert (found.evaluation_row_s or 0) > 0
    assert (found.save_s or 0) > 0
    [checkpoint] = list_checkpoints(Store.open(str(tmp_path / "out")))
    assert found.checkpoint_bytes == sum(each.size for each in checkpoint.commit.files)
    assert found.peak_bytes > 50e6
    assert torch.distributed.is_initialized() is False
