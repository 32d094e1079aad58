"""`TFTrainer`: Keras models under the Trainer's loop. Its numbers are those of Keras' own `fit`; resumes are exact."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.keras_toys import (
    PLAIN,
    arrays,
    built,
    classifier,
    decay,
    fit,
    keras,
    keras_model,
    pairs,
    trained,
    trainer,
)
from tests.support.resuming import prove
from tests.support.training import losses
from trainer_lib import TFTrainer
from trainer_lib.checkpoint.values import capture_rng
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.model.seeding import capture_seeds, keep_seeds, part_seeds, restore_seeds

pytestmark = [
    pytest.mark.needs("keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]
FALLING = [1e-2 * (1 - step / 12) for step in range(12)]


def rates(one: Any) -> list[float]:
    return [entry["learning_rate"] for entry in one.state.log_history if "loss" in entry]


# ----------------------------------------------------------------------------------------------------- the same numbers
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Nadam", "Lion", "Adafactor"])
def test_a_given_keras_optimizer_trains_as_in_fit(name: str, tmp_path: Path) -> None:
    make = getattr(keras().optimizers, name)
    more = {"momentum": 0.9} if name == "SGD" else {}
    expected = fit(model := classifier(), make(decay(12), **more), count=24, epochs=2, batch=4)
    schedule = decay(12)
    one = trained(tmp_path, pairs(24), optimizers=(make(schedule, **more), schedule), **PLAIN)
    np.testing.assert_allclose(losses(one), expected, rtol=1e-5)
    for mine, theirs in zip(one.model.variables, model.variables, strict=True):
        np.testing.assert_allclose(mine.value.detach(), theirs.value.detach(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(rates(one), FALLING, rtol=1e-5)
    assert int(one.optimizer.iterations) == 12 and one.lr_scheduler(3) == pytest.approx(FALLING[3])


def test_without_an_optimizer_it_is_adamw_with_a_polynomial_decay(tmp_path: Path) -> None:
    """`create_optimizer_and_scheduler`: `warmup_steps` and `poly_power` shape the schedule; biases do not decay."""
    one = trained(tmp_path, pairs(24), warmup_steps=4, poly_power=2.0, weight_decay=0.1)
    assert isinstance(one.optimizer, torch.optim.AdamW)
    assert [(group["weight_decay"], len(group["params"])) for group in one.optimizer.param_groups] == [(0.1, 2), (0, 2)]
    rising = [1e-2 * step / 4 for step in range(4)]
    falling = [1e-2 * (1 - step / 8) ** 2 for step in range(8)]
    np.testing.assert_allclose(rates(one), rising + falling, rtol=1e-5, atol=1e-9)
    assert losses(one)[-1] < losses(one)[0]
    # A schedule beside an optimizer is followed.
    beside = trained(tmp_path / "beside", pairs(24), optimizers=(keras().optimizers.Adam(1.0), decay(12)), **PLAIN)
    np.testing.assert_allclose(rates(beside), FALLING, rtol=1e-5)


def test_an_optimizer_of_torch_may_be_given_or_chosen_by_the_arguments(tmp_path: Path) -> None:
    one = trained(tmp_path, pairs(24), optim="sgd", lr_scheduler_type="cosine")
    assert isinstance(one.optimizer, torch.optim.SGD)
    given = torch.optim.SGD(classifier().parameters(), 0.1)
    assert trainer(tmp_path / "given", pairs(4), optimizers=(given, None)).optimizer is given


def test_accumulated_micro_batches_train_as_one_batch(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", pairs(20), per_device_train_batch_size=8)
    parts = trained(tmp_path / "parts", pairs(20), per_device_train_batch_size=2, gradient_accumulation_steps=4)
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------ the model
def test_a_model_that_takes_labels_computes_its_loss_over_all_target_items(tmp_path: Path) -> None:
    """Unequal numbers of targets: accumulated or not, the step has the mean over all of them."""
    module, model = keras(), keras_model()

    class Tagger(model):  # type: ignore[misc, valid-type]
        """Computes its loss, one value per labelled token, as the models of transformers for TensorFlow did."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = module.layers.Embedding(11, 4), module.layers.Dense(11)

        def call(self, inputs: Any, labels: Any = None, training: bool = False) -> Any:
            logits = self.head(module.ops.tanh(self.table(inputs["input_ids"])))
            if labels is None:
                return (logits,)
            true = labels.flatten().long()
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), true, reduction="none")[true != -100], logits

    drawn = np.random.default_rng(0).integers(0, 11, (12, 7))
    rows = [({"input_ids": row}, np.where(np.arange(7) <= number % 7, row, -100)) for number, row in enumerate(drawn)]
    runs = []
    for size in (4, 1):
        torch.manual_seed(0)
        batches: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        keras().utils.set_random_seed(0)
        tagger = built(Tagger(), {"input_ids": drawn[:1]})
        tagging = trained(tmp_path / str(size), rows, model=tagger, eval_dataset=rows[:5], **batches)
        runs.append(losses(tagging))
        assert math.isfinite(tagging.evaluate()["eval_loss"])
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)


def test_mappings_of_inputs_and_labels_go_to_the_model_by_name(tmp_path: Path) -> None:
    module, model, seen = keras(), keras_model(), []

    class Spans(model):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.head = module.layers.Dense(2)

        def call(self, x: Any, start_positions: Any = None, end_positions: Any = None) -> Any:
            logits = self.head(x)
            if start_positions is None:
                return logits
            seen.append((start_positions.shape, end_positions.shape))
            return {"loss": (logits[:, 0] - start_positions).square().mean(), "logits": logits, "end": end_positions}

    rows = [(row, {"start_positions": int(y), "end_positions": int(y) + 1}) for row, y in pairs(8)]
    one = trained(tmp_path, rows, model=built(Spans(), arrays(1)[0]), num_train_epochs=1)
    assert set(seen) == {((4,), (4,))}
    out = one.predict(rows)
    assert [part.shape for part in out.predictions] == [(8, 2), (8,)]
    assert [len(part) for part in out.label_ids] == [8, 8]
    a, b = module.layers.Input((2,), name="a"), module.layers.Input((3,), name="b")
    several = module.Model({"a": a, "b": b}, module.layers.Dense(1)(module.layers.concatenate([a, b])))
    several.compile(loss="mse")
    named = [({"a": row[:2], "b": row[2:]}, float(y)) for row, y in pairs(8)]
    two = trained(tmp_path / "two", named, model=several)
    assert two.predict([({"a": row["a"], "b": row["b"]},) for row, _ in named]).predictions.shape == (8, 1)


def test_samples_may_be_mappings_and_a_loss_function_may_be_given(tmp_path: Path) -> None:
    rows = [{"x": row, "labels": label} for row, label in pairs(16)]

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, labels)

    def share(outputs: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, labels, reduction="sum").div(num_items_in_batch)

    plain = trained(tmp_path / "plain", pairs(16), gradient_accumulation_steps=2, **PLAIN)
    for func in (loss, share):
        given: dict[str, Any] = {"compute_loss_func": func, "gradient_accumulation_steps": 2, **PLAIN}
        one = trained(tmp_path / func.__name__, rows, **given)
        np.testing.assert_allclose(losses(one), losses(plain), rtol=1e-5)


def test_a_label_without_an_output_is_named_with_the_outputs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"labels: .*Target 3 is out of bounds.*Count classes from 0"):
        trained(tmp_path, [(row, np.int64(3)) for row, _ in pairs(4)], **PLAIN)


def test_regularizers_count_once_per_step_whatever_computes_the_loss(tmp_path: Path) -> None:
    """As in fit(), and not once per micro-batch."""
    module, model = keras(), keras_model()

    class Own(model):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            decay = module.regularizers.L2(0.1)
            self.head = module.layers.Dense(3, kernel_initializer="ones", kernel_regularizer=decay)

        def call(self, x: Any, labels: Any = None) -> Any:
            logits = self.head(x)
            return logits if labels is None else (torch.nn.functional.cross_entropy(logits, labels), logits)

    given: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    own = trained(tmp_path / "own", pairs(8), model=built(Own(), arrays(1)[0]), **given)
    func = {"compute_loss_func": torch.nn.functional.cross_entropy}
    by_func = trained(tmp_path / "func", pairs(8), model=built(Own(), arrays(1)[0]), **func, **given)
    expected = math.log(3) + 0.1 * 15  # equal logits, and a kernel of 5 x 3 ones
    np.testing.assert_allclose([*losses(own), *losses(by_func)], expected, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------- the data
class Once:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Sized(Once):
    def __len__(self) -> int:
        return len(self.rows)


class FakeTf(Sized):
    """What is used of a `tf.data.Dataset`."""

    def as_numpy_iterator(self) -> Iterator[Any]:
        return iter(self.rows)

    def cardinality(self) -> int:
        return len(self.rows)

    def shuffle(self, size: int, seed: int, reshuffle_each_iteration: bool) -> FakeTf:
        return FakeTf([self.rows[index] for index in np.random.default_rng(seed).permutation(size)])


@pytest.mark.parametrize("kind", [Once, Sized, FakeTf])
def test_any_iterable_trains_evaluates_and_predicts(kind: Any, tmp_path: Path) -> None:
    steps = {} if kind is not Once else {"max_steps": 6}
    one = trained(tmp_path / "one", kind(pairs(12)), eval_dataset=kind(pairs(6, seed=2)), **PLAIN, **steps)
    other = trained(tmp_path / "other", pairs(12), eval_dataset=pairs(6, seed=2), **PLAIN)
    assert losses(one) == losses(other) and one.evaluate()["eval_loss"] == other.evaluate()["eval_loss"]
    np.testing.assert_array_equal(one.predict(kind(pairs(5))).predictions, other.predict(pairs(5)).predictions)


def test_a_tensorflow_data_set_is_shuffled_by_seed_and_epoch(tmp_path: Path) -> None:
    seen: list[list[Any]] = []

    class Seeing(TFTrainer):
        def run_model(self, features: Any, labels: Any, training: bool) -> Any:
            seen[-1] += features[:, 0].tolist()
            return super().run_model(features, labels, training)

    for name in ("one", "two"):
        seen.append([])
        trainer(tmp_path / name, FakeTf(pairs(12)), cls=Seeing).train()
    first, second = seen[0][:12], seen[0][12:]
    assert seen[0] == seen[1] and first != second and sorted(first) == sorted(second)


@pytest.fixture
def tensorflow() -> Any:
    """TensorFlow, imported before a test is watched: it sets variables of the environment for the whole process."""
    return importlib.import_module("tensorflow")


@pytest.mark.needs("tensorflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorFlow's own
def test_a_real_data_set_trains_like_a_list_resumes_and_a_writer_gets_the_log(tensorflow: Any, tmp_path: Path) -> None:
    def dataset(count: int) -> Any:
        return tensorflow.data.Dataset.from_tensor_slices(arrays(count))

    class Mine(TFTrainer):
        def get_train_tfdataset(self) -> Any:
            return self.train_dataset.repeat().batch(4)

        def get_eval_tfdataset(self, eval_dataset: Any = None) -> Any:
            return self.eval_dataset.repeat().batch(4), 3, 12

    def make(folder: Path, *callbacks: Any) -> Any:
        settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100}
        return trainer(folder, dataset(22), model=classifier(0.5), callbacks=callbacks, **settings)

    writer = tensorflow.summary.create_file_writer(str(tmp_path / "log"))
    settings = {"train_sampling_strategy": "sequential"}
    one = trainer(tmp_path / "one", dataset(24), eval_dataset=dataset(12), tb_writer=writer, **settings)
    endless = trainer(tmp_path / "endless", dataset(24), cls=Mine, eval_dataset=dataset(12), max_steps=12)
    other = trainer(tmp_path / "other", pairs(24), eval_dataset=pairs(12), **settings)
    for each in (one, endless, other):
        each.train()
        assert losses(each) == losses(one)
        assert each.evaluate()["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"])
    assert one.predict(dataset(5)).predictions.tolist() == other.predict(pairs(5)).predictions.tolist()
    writer.close()
    reading: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    assert "train/loss" in events.Tags()["tensors"]
    prove(make, tmp_path / "resumed", 8)


# -------------------------------------------------------------------------------------------------------- exact resumes
def seeds(one: Any) -> dict[str, list[int]]:
    return capture_seeds(one.model)


@pytest.mark.parametrize(("optimizer", "stop"), [(None, 2), ("Adam", 4), ("SGD", 2), ("Nadam", 4), ("Adafactor", 2)])
def test_a_resumed_training_equals_an_uninterrupted_one(optimizer: str | None, stop: int, tmp_path: Path) -> None:
    """Dropout, BatchNorm, accumulation, a smaller last step; torch's optimizer, and those of Keras."""

    def make(folder: Path, *callbacks: Any) -> Any:
        given: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}
        if optimizer is not None:
            more = {"momentum": 0.9} if optimizer == "SGD" else {}
            schedule = keras().optimizers.schedules.CosineDecay(1e-2, 6)
            given["optimizers"] = (getattr(keras().optimizers, optimizer)(schedule, **more), schedule)
        model = classifier(0.5, norm=True)
        return trainer(folder, pairs(22), model=model, callbacks=callbacks, num_train_epochs=2, **given)

    whole, resumed = prove(make, tmp_path, stop)
    assert seeds(whole) == seeds(resumed) and seeds(whole)


def test_an_evaluation_leaves_no_trace_in_the_seeds(tmp_path: Path) -> None:
    module, model = keras(), keras_model()

    class Noisy(model):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.head, self.drop = module.layers.Dense(3), module.layers.Dropout(0.5, seed=3)

        def call(self, x: Any, labels: Any = None) -> Any:
            logits = self.head(self.drop(x, training=True))  # in evaluations, too
            logits = logits + 0 * module.random.normal((1,))
            return logits if labels is None else (torch.nn.functional.cross_entropy(logits, labels), logits)

    ends = []
    for name, given in (("plain", {}), ("evaluated", {"eval_strategy": "steps", "eval_steps": 1})):
        module.utils.set_random_seed(0)
        one = trained(tmp_path / name, pairs(16), model=built(Noisy(), arrays(1)[0]), eval_dataset=pairs(8), **given)
        ends.append((seeds(one), {k: v.clone() for k, v in one.model.state_dict().items()}))
    assert ends[0][0] == ends[1][0] and "global" in ends[0][0]
    assert all(torch.equal(value, ends[1][1][name]) for name, value in ends[0][1].items())


def test_seeds_are_captured_restored_kept_and_parted() -> None:
    model = classifier(0.5)
    before = capture_seeds(model)
    with keep_seeds(model):
        model(np.zeros((2, 5), "float32"), training=True)
        assert capture_seeds(model) != before
    assert capture_seeds(model) == before
    part_seeds(model, 42, 0, 1)
    parted = capture_seeds(model)
    assert parted != before
    part_seeds(model, 42, 0, 2)
    assert capture_seeds(model) != parted
    restore_seeds(model, {**before, "of another model": [1, 2]})
    assert capture_seeds(model) == before
    assert capture_seeds(torch.nn.Linear(2, 2)).keys() <= {"global"}, "other models have none"
    assert "seeds" not in capture_rng()
