"""The verbs of the worker, with a model small enough to run them all in the test's own process."""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

from tests.support import tiny
from tests.support.launched import request
from tests.support.tiny import ARGS, RECIPE, run
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.data.rows.parts import SplitParts
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import CodeError, ConfigError, DamagedError, DataError
from trainer_lib.protocol.footprint import Estimate, Probe
from trainer_lib.protocol.requests import CheckpointMetrics, PreparedData, StopEarly, TrainResult
from trainer_lib.storage import Store
from trainer_lib.strategies.base import Strategy
from trainer_lib.trainer.history import StepHistory
from trainer_lib.worker.process import session
from trainer_lib.worker.train import thin_losses

MICRO = {**tiny.ARGS, "per_device_train_batch_size": 4}
PARAMETERS = 6 * 16 + 16 + 16 * 2 + 2
NAN, INF = math.nan, math.inf


@dataclass
class Trained:
    """A training of the tiny recipe, and what is asked of its model."""

    data: PreparedData
    output: str
    result: TrainResult
    events: list[dict[str, Any]]

    def ask(self, folder: Path, verb: str, recipe: str = tiny.RECIPE, **fields: Any) -> Any:
        given = {"data": self.data, "model_url": f"{self.output}/model", "model": {}, "args": tiny.ARGS, **fields}
        return request(folder, recipe, verb, output=str(folder / verb), **given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared_data: PreparedData) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    output = str(folder / "train")
    return Trained(prepared_data, output, *tiny.heard(tiny.train_request(folder, prepared_data, output)))


def check_files(output: str, result: Any) -> set[str]:
    for file in result.files:
        assert Store.open(output).digest(file.path) == file.sha256
        assert Store.open(output).size(file.path) == file.size
    return {file.path for file in result.files}


def test_prepare_gives_splits_info_and_files(prepared_data: PreparedData) -> None:
    assert {name: split.rows for name, split in prepared_data.splits.items()} == {"train": 90, "test": 25}
    assert prepared_data.splits["train"].columns == {"x": "float32[*]", "label": "int64", "row_id": "int64"}
    assert prepared_data.info == {"width": 6}
    files = check_files(prepared_data.url, prepared_data)
    assert files >= {"data/train/00002.arrow", "data/test/00000.arrow", "assets/note.txt"}


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return {'train': []}", "split 'train' is empty"),
        ("return {'train': [{'x': 1.0}, {'x': float('nan')}]}", "NaN in split 'train', row 1, column 'x'"),
        ("out.info['x'] = object(); return {'train': [{'x': 1.0}]}", "JSON"),
    ],
)
def test_prepare_refuses_bad_data(tmp_path: Path, body: str, what: str) -> None:
    recipe = f"def prepare(options, out):\n    {body}\ndef build_model(options, data): ...\n"
    with pytest.raises(DataError, match=what):
        tiny.run(request(tmp_path, recipe), kind="in_process")


def test_train_exports_a_model_and_says_what_it_did(tmp_path: Path, trained: Trained) -> None:
    output, result = trained.output, trained.result
    assert check_files(output, result) >= {"model/model.safetensors", "model/config.json"}
    assert (result.global_step, result.global_samples) == (36, 270)
    assert (result.world_size, result.resumed_from, result.parameters) == (1, None, 146)
    assert result.checkpoints[0] == "checkpoint-36"
    assert len(result.checkpoints) == 2
    assert result.metrics["train_loss"] < 0.7
    history = json.loads(Path(output, "history.json").read_text())
    assert [entry["step"] for entry in history if "loss" in entry] == [10, 20, 30]
    # Finished, it takes no step and gives the same.
    again = tiny.run(tiny.train_request(tmp_path, trained.data, output), kind="in_process")
    assert (again.resumed_from, again.global_step, again.files) == (36, 36, result.files)
    # The bytes do not depend on where they lie or how it was logged.
    changed = {"logging_steps": 3, "save_steps": 20, "run_name": "other"}
    asked = tiny.train_request(tmp_path, trained.data, str(tmp_path / "elsewhere"), **changed)
    assert tiny.run(asked, kind="in_process").files == result.files


def test_samples_are_counted_also_when_the_batch_changes_between_attempts(
    tmp_path: Path, prepared_data: PreparedData
) -> None:
    output = str(tmp_path / "train")
    first = tiny.run(tiny.train_request(tmp_path, prepared_data, output, max_steps=6), kind="in_process")
    smaller = {"global_batch_size": 4, "per_device_train_batch_size": 4, "allow_global_batch_change": True}
    again = tiny.run(tiny.train_request(tmp_path, prepared_data, output, max_steps=12, **smaller), kind="in_process")
    assert (first.global_samples, again.global_step, again.global_samples) == (6 * 8, 12, 6 * 8 + 6 * 4)


def test_events_tell_position_speed_and_time_left(trained: Trained) -> None:
    events = trained.events
    logs = [event for event in events if event["event"] == "log" and "loss" in event]
    assert [event["step"] for event in logs] == [10, 20, 30]
    assert all(event["max_steps"] == 36 and event["eta_s"] > 0 and event["samples_per_second"] > 0 for event in logs)
    assert [event["step"] for event in events if event["event"] == "save"] == [6, 12, 18, 24, 30, 36]


def test_evaluate_measures_each_split_and_what_the_recipe_adds(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "QUIET_S", 0.0)
    result, events = tiny.heard(trained.ask(tmp_path, "evaluate", splits=("test", "train")))
    assert set(result.metrics) == {"test", "train", "overall"}
    # Both splits are one progress, in rows, with the time left once the first batches are through.
    shown = [event for event in events if event.get("max_steps")]
    assert {event["max_steps"] for event in shown} == {25 + 90}
    steps = [event["step"] for event in shown]
    assert steps == sorted(steps)
    assert (25 in steps, steps[-1], shown[-1]["eta_s"]) == (True, 115, 0)
    assert re.fullmatch(r"evaluating: batch 4 of \d+, [\d.]+ s left", shown[3]["message"])
    assert "eta_s" not in shown[0]
    assert 0.5 < result.metrics["test"]["accuracy"] <= 1
    assert result.metrics["test"]["loss"] > 0
    weights = load_file(f"{trained.output}/model/model.safetensors").values()
    total = sum(float(abs(tensor).sum()) for tensor in weights)
    assert result.metrics["overall"]["weights"] == pytest.approx(total, rel=1e-5)
    outcomes = {"outcomes/test.json", "outcomes/train.json"}
    assert check_files(str(tmp_path / "evaluate"), result) == {"metrics.json", "artifacts/note.txt", *outcomes}
    other = tiny.RECIPE.replace("nn.Linear(16, 2)", "nn.Linear(16, 3)")
    with pytest.raises(DamagedError, match="weights do not fit this model"):
        tiny.run(trained.ask(tmp_path, "evaluate", other, splits=("test",)), kind="in_process")


def test_outcomes_are_what_the_recipe_pairs_with_the_row_of_each(tmp_path: Path, trained: Trained) -> None:
    own = """

def outcome_pairs(p):
    off = p.predictions[:, 1].copy()
    off[7] += 1000
    return {"predictions": off[::-1], "labels": p.predictions[::-1, 1], "rows": range(len(off))[::-1]}
"""
    tiny.run(trained.ask(tmp_path, "evaluate", tiny.RECIPE + own, splits=("test",)), kind="in_process")
    found = json.loads((tmp_path / "evaluate" / "outcomes/test.json").read_text())
    assert (found["kind"], found["rows"]) == ("numbers", 25)
    assert found["hardest"][0][0] == 7
    assert found["hardest"][0][3] == pytest.approx(1000, rel=1e-4)
    assert found["inputs"].keys() == {str(row) for row in range(25)}
    assert found["inputs"]["7"]["text"]
    asked = trained.ask(tmp_path, "evaluate", tiny.RECIPE + own, splits=("test",), show_inputs=False)
    tiny.run(asked, kind="in_process")
    assert "inputs" not in json.loads((tmp_path / "evaluate" / "outcomes/test.json").read_text())


def test_predict_writes_every_row_once_and_keeps_finished_parts(tmp_path: Path, trained: Trained) -> None:
    output, asked = str(tmp_path / "predict"), trained.ask(tmp_path, "predict", rows_per_file=10, split="test")
    result = tiny.run(asked, kind="in_process")
    parts = sorted(Path(output, "predictions/test").iterdir())
    rows = [row for part in parts for row in pq.read_table(part)["row_id"].to_pylist()]
    assert (result.rows, result.parts, len(parts), rows) == (25, 3, 3, list(range(25)))
    assert not [path for path in Path(output, "claims").rglob("*") if path.is_file()]
    scores = pq.read_table(parts[0])["scores"].to_pylist()
    assert pq.read_table(parts[0])["prediction"].to_pylist() == [int(b > a) for a, b in scores]
    kept = parts[1].stat().st_mtime_ns
    parts[0].unlink()
    SplitParts(Store.open(output), "test", rows=25, rows_per_file=10).forget_damaged()
    again = tiny.run(asked, kind="in_process")
    assert (again.parts, again.rows, len(list(parts[0].parent.iterdir()))) == (1, 10, 3)
    assert parts[1].stat().st_mtime_ns == kept


@pytest.mark.parametrize(
    ("change", "fields", "error", "what"),
    [
        (("return Net(", "return 7  # ("), {}, ConfigError, "must return a torch.nn.Module"),
        (("logits = self", "logits = self.nothing + self"), {}, CodeError, "no attribute 'nothing'"),
        (('assert data.read_file("note.txt")', 'assert data.read_file("no")'), {}, ConfigError, "no such file"),
        (("", ""), {"args": {"learning_rat": 1}}, ConfigError, "train.args.learning_rat"),
        (("", ""), {"train_split": "trian"}, ConfigError, "^split"),
    ],
)
def test_train_says_what_is_wrong_with_the_recipe_or_the_request(
    tmp_path: Path, trained: Trained, change: tuple[str, str], fields: Any, error: type[Exception], what: str
) -> None:
    asked = replace(tiny.train_request(tmp_path, trained.data, str(tmp_path / "train")), **fields)
    path = Path(asked.recipe.path)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(error, match=what) as caught:
        tiny.run(asked, kind="in_process")
    if error is CodeError:
        assert f"{path}:" in str(caught.value)


# Collator and model draw, also in an evaluation, which continues from the training's random numbers.
DRAWING = RECIPE.replace(
    'torch.from_numpy(np.stack([row["x"] for row in rows]))',
    'torch.from_numpy(np.stack([row["x"] for row in rows])) * (1 + torch.rand(1))',
).replace("self.layers(x)", "self.layers(x) + torch.rand(1)[0] * x[:, :2]")
TIMINGS = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def test_what_a_collator_draws_does_not_depend_on_the_files_of_the_predictions(
    tmp_path: Path, trained: Trained
) -> None:
    drawing = DRAWING.replace("self.layers(x) + torch.rand(1)[0] * x[:, :2]", "self.layers(x)")
    scores = []
    for size in (8, 24):
        args = {"use_cpu": True, "per_device_eval_batch_size": 4}
        asked = trained.ask(tmp_path / str(size), "predict", drawing, rows_per_file=size, split="test", args=args)
        tiny.run(asked, kind="in_process")
        files = tmp_path / str(size) / "predict" / "predictions" / "test"
        scores.append(pq.read_table(files)["scores"].to_pylist())
    assert scores[0] == scores[1]


def train_beside(folder: Path, recipe: str, data: PreparedData, **args: Any) -> dict[int, dict[str, float]]:
    """Train with evaluations; returns what they logged, by step."""
    given = {**ARGS, "num_train_epochs": 1, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, **args}
    more = {"data": data, "model": {}, "args": given, "train_split": "train", "eval_split": "test"}
    run(request(folder, recipe, "train", output=str(folder / "train"), **more), kind="in_process")
    history = json.loads((folder / "train" / "history.json").read_text())
    return {entry["step"]: _measured(entry) for entry in history if "eval_loss" in entry}


def beside(folder: Path, recipe: str, data: PreparedData, step: int, **args: Any) -> CheckpointMetrics:
    checkpoint = str(folder / "train" / "checkpoints" / f"checkpoint-{step}")
    more = {"data": data, "args": {**ARGS, **args}, "checkpoint": checkpoint, "eval_split": "test"}
    asked = request(folder, recipe, "evaluate_checkpoint", output=str(folder / "follow"), **more)
    return run(asked, kind="in_process")  # type: ignore[no-any-return]


def _measured(entry: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in entry.items() if name not in (*TIMINGS, "step")}


def test_a_training_stops_early_and_gives_the_best_weights(tmp_path: Path, prepared_data: PreparedData) -> None:
    choose: dict[str, Any] = {"num_train_epochs": 5, "save_total_limit": None, "greater_is_better": False}
    choose |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    choose |= {"save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    asked = tiny.train_request(tmp_path, prepared_data, str(tmp_path / "train"), **choose)
    asked = replace(asked, stop_early=StopEarly(2, threshold=1e9), eval_split="test")
    result = run(asked, kind="in_process")
    assert result.global_step == 12  # the first evaluation is the best so far, and two more are not better by enough
    assert run(asked, kind="in_process").global_step == 12  # a run that continues has stopped


def test_lists_that_collate_gets_as_arrays_are_not_warned_of(tmp_path: Path, trained: Trained) -> None:
    recipe = RECIPE.replace("torch.from_numpy(np.stack([row[", "torch.tensor(([row[")
    assert recipe != RECIPE
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(trained.ask(tmp_path, "evaluate", recipe, splits=["test"]), kind="in_process")
    assert not [warning for warning in told if "extremely slow" in str(warning.message)]


@pytest.mark.parametrize("kind", ["float", "double"])
def test_lists_of_floats_fit_the_model_that_gets_them(tmp_path: Path, kind: str) -> None:
    collate = RECIPE[RECIPE.index("def collate(rows):") : RECIPE.index("def compute_metrics")]
    recipe = RECIPE.replace(collate, "").replace('{"x": x,', '{"x": x.tolist(),')
    recipe = recipe.replace('return Net(data.info["width"])', f'return Net(data.info["width"]).{kind}()')
    data = tiny.prepare(request(tmp_path, recipe, output=str(tmp_path / "data")))
    assert data.splits["train"].columns["x"] == "float64[*]"
    asked = request(tmp_path, recipe, "train", output=str(tmp_path / "out"), data=data, model={}, args={"max_steps": 2})
    assert run(asked, kind="in_process").global_step == 2


@pytest.mark.parametrize(
    "args", [{}, {"bf16": True, "per_device_eval_batch_size": 7}], ids=["float32", "bfloat16, a ragged last batch"]
)
def test_the_numbers_are_those_of_an_evaluation_inside_training(
    args: dict[str, Any], tmp_path: Path, prepared_data: PreparedData
) -> None:
    inside = train_beside(tmp_path, DRAWING, prepared_data, **args)
    assert set(inside) >= {4, 8}
    for step in (8, 12) if 12 in inside else (4, 8):
        found = beside(tmp_path, DRAWING, prepared_data, step, **args)
        assert found.step == step
        assert _measured(found.metrics) == inside[step]
    weights = tmp_path / "train" / "checkpoints" / "checkpoint-8" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DamagedError, match="digest") as error:
        beside(tmp_path, DRAWING, prepared_data, 8, **args)
    assert "checkpoint-8/model.safetensors" in str(error.value.field)


GENERATING = """
import random

import torch
import trainer_lib


def prepare(options, out):
    draw = random.Random(0)
    rows = [{"input_ids": [draw.randrange(1, 9) for _ in range(draw.randrange(1, 30))]} for _ in range(60)]
    return {"test": rows}


def collate(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = [torch.as_tensor(row["input_ids"]) for row in rows]
    return {"input_ids": torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in ids])}


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def generate(self, input_ids):
        # As many tokens as the prompt's sum says, from the prompt alone; 0 is padding.
        most = int((input_ids.sum(1) % 7).max()) + 1
        places = torch.arange(most).expand(len(input_ids), most)
        made = torch.where(places <= (input_ids.sum(1, keepdim=True) % 7), input_ids.sum(1, keepdim=True) + places, 0)
        return made, torch.full((len(input_ids),), input_ids.shape[1])

    def forward(self, input_ids):
        raise AssertionError("it generates")


def build_model(options, data):
    return Counts()


class Trainer(trainer_lib.Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return None, model.generate(**self._prepare_inputs(inputs)), None


def prediction_columns(predictions, data):
    tokens, width = predictions
    return {"tokens": [[int(t) for t in row if t > 0] for row in tokens], "width": width}
"""


def predicted(folder: Path, data: PreparedData, name: str, sort_by: str | None) -> tuple[dict[str, Any], Path]:
    args = {"use_cpu": True, "per_device_eval_batch_size": 4}
    more = {"split": "test", "rows_per_file": 25, "sort_by": sort_by, "model_url": str(folder / "model"), "args": args}
    asked = request(folder, GENERATING, "predict", output=str(folder / name), data=data, **more)
    tiny.run(asked, kind="in_process")
    files = folder / name / "predictions" / "test"
    return pq.read_table(files).to_pydict(), files


def test_generated_rows_keep_their_order_and_need_less_padding(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch import ones

    data = tiny.prepare(request(tmp_path, GENERATING, output=str(tmp_path / "data")))
    (tmp_path / "model").mkdir()
    save_file({"weight": ones(1)}, tmp_path / "model" / "model.safetensors")
    (plain, _), (by_length, files) = (predicted(tmp_path, data, str(by), by) for by in (None, "input_ids"))
    widths = [sum(table.pop("width")) for table in (plain, by_length)]
    assert plain == by_length
    assert by_length["row_id"] == list(range(60))
    assert widths[1] < 0.75 * widths[0]

    # Interrupted: a file is not there yet, and it comes as it was.
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    for record in (tmp_path / "input_ids" / "records").glob("**/00000001.json"):
        record.unlink()
    (files / "part-00001.parquet").unlink()
    predicted(tmp_path, data, "input_ids", "input_ids")
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before
    with pytest.raises(DataError, match="no column 'ids'"):
        predicted(tmp_path, data, "other", "ids")


def ask(folder: Path, data: PreparedData, verb: str, recipe: str = tiny.RECIPE, **fields: Any) -> Any:
    given = {"data": data, "model": {}, "args": MICRO, **fields}
    return tiny.run(request(folder, recipe, verb, output=str(folder / "out"), **given), kind="in_process")


def test_the_estimate_counts_every_byte_of_weights_gradients_and_optimizer(
    tmp_path: Path, prepared_data: PreparedData
) -> None:
    found = ask(tmp_path, prepared_data, "estimate", eval_split="test")
    assert isinstance(found, Estimate)
    size = found.size
    assert (size.parameters, size.trainable, size.parameter_bytes) == (PARAMETERS, PARAMETERS, 4 * PARAMETERS)
    assert (size.gradient_bytes, size.stored_bytes) == (4 * PARAMETERS, 4 * PARAMETERS)
    # Two moments of each element and a step of each of four tensors.
    assert size.optimizer_bytes == 2 * 4 * PARAMETERS + 4 * 4
    assert (found.device, found.notes, found.tokens_per_sample) == ("cpu", (), None)
    assert found.process_bytes > 50e6
    # At least the layers' outputs of four rows: 16 hidden values twice, and 2 logits.
    assert size.activation_bytes is not None
    assert 4 * 4 * (16 + 16 + 2) <= size.activation_bytes < 20_000
    assert size.evaluation_bytes is not None


def test_the_estimate_sees_what_is_recomputed(tmp_path: Path, prepared_data: PreparedData) -> None:
    stack = "nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh()) for _ in range(6)))"
    wide = tiny.RECIPE.replace("(16, 2)", f"(16, 512), {stack}, nn.Linear(512, 2)")
    assert wide != tiny.RECIPE
    choice: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every": 1}}
    plain, saving = (
        ask(tmp_path, prepared_data, "estimate", wide, args={**MICRO, **more}).size for more in ({}, choice)
    )
    assert plain.parameter_bytes == saving.parameter_bytes
    assert saving.activation_bytes < 0.6 * plain.activation_bytes


def test_a_model_that_needs_values_is_sized_all_the_same(tmp_path: Path, prepared_data: PreparedData) -> None:
    reading = tiny.RECIPE.replace("        logits = self.layers(x)", "        float(x.sum()); logits = self.layers(x)")
    found = ask(tmp_path, prepared_data, "estimate", reading)
    size, [note] = found.size, found.notes
    assert (size.parameters, size.activation_bytes, size.optimizer_bytes) == (PARAMETERS, None, None)
    assert note.startswith("The memory of a step could not be worked out without values (")
    assert note.endswith("--probe measures it.")
    needing = tiny.RECIPE.replace("    return Net(", "    torch.zeros(3)[1].item()\n    return Net(")
    found = ask(tmp_path, prepared_data, "estimate", needing)
    assert found.notes == ("The model was built with its weights: its code does not work without values.",)
    assert found.size.activation_bytes is not None


def test_the_probe_times_steps_an_evaluation_and_a_save(tmp_path: Path, prepared_data: PreparedData) -> None:
    steps = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    found = ask(tmp_path, prepared_data, "probe", args={**MICRO, **steps}, eval_split="test", rows=10)
    assert isinstance(found, Probe)
    assert found.steps == 2
    assert min(found.step_s, found.evaluation_row_s or 0, found.save_s or 0) > 0
    [checkpoint] = list_checkpoints(Store.open(str(tmp_path / "out")))
    assert found.checkpoint_bytes == sum(each.size for each in checkpoint.commit.files)
    assert found.peak_bytes > 50e6
    assert torch.distributed.is_initialized() is False


@pytest.mark.parametrize(
    ("losses", "most", "kept"),
    [
        ([], 3, []),
        ([(1, 0.5)], 3, [(1, 0.5)]),
        ([(1, 3.0), (2, 2.0), (3, 1.0)], 3, [(1, 3.0), (2, 2.0), (3, 1.0)]),
        ([(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.0)], 3, [(2, 2.5), (4, 0.5)]),
        ([(7, 3.0), (8, NAN), (9, 1.0), (10, INF)], 2, [(8, 3.0), (10, 1.0)]),
        ([(1, NAN), (2, -INF), (3, 1.0)], 2, [(2, "NaN"), (3, 1.0)]),
        ([(1, NAN), (2, INF)], 5, [(1, "NaN"), (2, "NaN")]),
        ([(step, float(step)) for step in range(1, 13)], 5, [(3, 2.0), (6, 5.0), (9, 8.0), (12, 11.0)]),
    ],
)
def test_at_most_so_many_means_are_kept(
    losses: list[tuple[int, float]], most: int, kept: list[tuple[int, float | str]]
) -> None:
    thinned = thin_losses(losses, most)
    assert [(each["step"], each["loss"]) for each in thinned] == kept
    json.dumps(thinned, allow_nan=False)


def test_unlogged_are_the_steps_since_the_last_log() -> None:
    history = StepHistory(Strategy(torch.device("cpu"), SingleProcess()), nonfinite_limit=5)

    def add(*losses: float) -> None:
        for loss in losses:
            history.append(torch.tensor(loss), torch.tensor(1.0))

    assert history.unlogged(0) == []
    add(4.0, 3.0)
    history.collect(2)
    assert history.unlogged(2) == [(1, 4.0), (2, 3.0)]
    history.take(hide_nonfinite=True)
    assert history.unlogged(2) == []
    add(2.0, NAN)
    history.collect(4)
    add(1.0)
    history.collect(5)
    [third, fourth, fifth] = history.unlogged(5)
    assert (third, fifth) == ((3, 2.0), (5, 1.0))
    assert fourth[0] == 4
    assert math.isnan(fourth[1])
    resumed = StepHistory(Strategy(torch.device("cpu"), SingleProcess()), nonfinite_limit=5)
    resumed.load_state(json.loads(json.dumps(history.state())))
    assert [step for step, _ in resumed.unlogged(5)] == [3, 4, 5]
