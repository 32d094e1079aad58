"""`TFTrainer`: Keras models under the Trainer's loop. Its numbers are those of Keras' own `fit`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.support import keras_toys
from tests.support.keras_toys import arrays, classifier, keras, keras_model, losses, pairs, trainer, weights
from trainer_lib import TFTrainer, TFTrainingArguments, TrainerCallback
from trainer_lib.errors import CodeError, ConfigError, DataError

pytestmark = [
    pytest.mark.needs("keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]
PLAIN: dict[str, Any] = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.0}


def decay(steps: int) -> Any:
    return keras().optimizers.schedules.PolynomialDecay(1e-2, steps, 0.0)


def fit(model: Any, optimizer: Any, count: int, epochs: int, batch: int) -> list[float]:
    """The loss of every batch of Keras' own training."""
    model.compile(optimizer=optimizer, loss=model.loss)
    seen: list[float] = []
    compute = model.compute_loss

    def noted(*args: Any, **given: Any) -> Any:
        loss = compute(*args, **given)
        seen.append(float(loss.detach()))
        return loss

    model.compute_loss = noted
    x, y = arrays(count)
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return seen[-epochs * count // batch :]  # fit() calls it once more, to build the metrics


# ----------------------------------------------------------------------------------------------------- the same numbers
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Nadam", "Lion", "Adafactor"])
def test_a_given_keras_optimizer_trains_as_in_fit(name: str, tmp_path: Path) -> None:
    make = getattr(keras().optimizers, name)
    more = {"momentum": 0.9} if name == "SGD" else {}
    expected = fit(model := classifier(), make(decay(12), **more), count=24, epochs=2, batch=4)
    schedule = decay(12)
    one = trainer(tmp_path, pairs(24), optimizers=(make(schedule, **more), schedule), **PLAIN)
    one.train()
    np.testing.assert_allclose(losses(one), expected, rtol=1e-5)
    for mine, theirs in zip(one.model.variables, model.variables, strict=True):
        np.testing.assert_allclose(mine.value.detach(), theirs.value.detach(), rtol=1e-5, atol=1e-7)
    rates = [entry["learning_rate"] for entry in one.state.log_history if "loss" in entry]
    np.testing.assert_allclose(rates, [1e-2 * (1 - step / 12) for step in range(12)], rtol=1e-5)
    assert int(one.optimizer.iterations) == 12 and one.lr_scheduler(3) == pytest.approx(rates[3])


def test_a_schedule_beside_an_optimizer_is_followed(tmp_path: Path) -> None:
    one = trainer(tmp_path, pairs(24), optimizers=(keras().optimizers.Adam(1.0), decay(12)), **PLAIN)
    one.train()
    rates = [entry["learning_rate"] for entry in one.state.log_history if "loss" in entry]
    np.testing.assert_allclose(rates, [1e-2 * (1 - step / 12) for step in range(12)], rtol=1e-5)


def test_without_an_optimizer_it_is_adam_with_a_polynomial_decay(tmp_path: Path) -> None:
    """`warmup_steps` and `poly_power` shape the schedule; with weight decay it is AdamW."""
    one = trainer(tmp_path, pairs(24), warmup_steps=4, poly_power=2.0, weight_decay=0.1)
    one.train()
    assert isinstance(one.optimizer.keras_optimizer, keras().optimizers.AdamW)
    assert [one.optimizer._use_weight_decay(each) for each in one.model.trainable_variables] == [True, False] * 2
    rates = [entry["learning_rate"] for entry in one.state.log_history if "loss" in entry]
    rising = [1e-2 * step / 4 for step in range(4)]
    np.testing.assert_allclose(rates, rising + [1e-2 * (1 - step / 8) ** 2 for step in range(8)], rtol=1e-5, atol=1e-9)
    assert losses(one)[-1] < losses(one)[0]
    plain = trainer(tmp_path / "plain", pairs(24))
    plain.create_optimizer_and_scheduler(num_training_steps=12)
    assert isinstance(plain.optimizer.keras_optimizer, keras().optimizers.Adam)
    schedule = plain.optimizer.keras_optimizer._learning_rate
    assert isinstance(schedule, keras().optimizers.schedules.PolynomialDecay)


def test_arguments_that_ask_for_another_optimizer_or_schedule_get_torchs(tmp_path: Path) -> None:
    one = trainer(tmp_path, pairs(24), optim="sgd", lr_scheduler_type="cosine")
    one.train()
    assert isinstance(one.optimizer, torch.optim.SGD)
    assert one.state.log_history[0]["learning_rate"] == pytest.approx(1e-2)
    given = torch.optim.SGD(classifier().parameters(), 0.1)
    assert trainer(tmp_path / "given", pairs(4), optimizers=(given, None)).optimizer is given


def test_accumulated_micro_batches_train_as_one_batch(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", pairs(20), per_device_train_batch_size=8)
    parts = trainer(tmp_path / "parts", pairs(20), per_device_train_batch_size=2, gradient_accumulation_steps=4)
    for one in (whole, parts):
        one.train()
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------ the model
class Tagger:
    """Made inside: keras is imported by then."""

    def __new__(cls) -> Any:
        module, model = keras(), keras_model()

        class Own(model):  # type: ignore[misc, valid-type]
            """Computes its loss, one value per labelled token, as the models of transformers for TensorFlow did."""

            def __init__(self) -> None:
                super().__init__()
                self.table = module.layers.Embedding(11, 4)
                self.head = module.layers.Dense(11)

            def call(self, inputs: Any, labels: Any = None, training: bool = False) -> Any:
                logits = self.head(module.ops.tanh(self.table(inputs["input_ids"])))
                if labels is None:
                    return (logits,)
                each = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten().long(), reduction="none"
                )
                return each[labels.flatten() != -100], logits

        return Own()


def token_pairs(count: int) -> list[Any]:
    draw = np.random.default_rng(0)
    rows = []
    for number in range(count):
        tokens = draw.integers(0, 11, size=7)
        labels = np.where(np.arange(7) <= number % 7, tokens, -100)
        rows.append(({"input_ids": tokens}, labels))
    return rows


def test_a_model_that_takes_labels_computes_its_loss_over_all_target_items(tmp_path: Path) -> None:
    """Unequal numbers of targets: accumulated or not, the step has the mean over all of them."""
    runs = []
    for size in (4, 1):
        torch.manual_seed(0)
        given: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        keras().utils.set_random_seed(0)
        one = trainer(tmp_path / str(size), token_pairs(12), model=Tagger(), eval_dataset=token_pairs(5), **given)
        one.train()
        runs.append(losses(one))
        assert math.isfinite(one.evaluate()["eval_loss"])
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)


def test_a_mapping_of_labels_goes_to_the_model_by_name(tmp_path: Path) -> None:
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
    one = trainer(tmp_path, rows, model=Spans(), num_train_epochs=1)
    one.train()
    assert set(seen) == {((4,), (4,))}
    out = one.predict(rows)
    assert [part.shape for part in out.predictions] == [(8, 2), (8,)] and [len(part) for part in out.label_ids] == [
        8,
        8,
    ]


def test_samples_may_be_mappings_and_a_loss_function_may_be_given(tmp_path: Path) -> None:
    rows = [{"x": row, "labels": label} for row, label in pairs(16)]

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, labels)

    one = trainer(tmp_path / "one", rows, compute_loss_func=loss, **PLAIN)
    other = trainer(tmp_path / "other", pairs(16), **PLAIN)
    for each in (one, other):
        each.train()
    np.testing.assert_allclose(losses(one), losses(other), rtol=1e-5)


def test_a_model_of_several_inputs_takes_a_mapping(tmp_path: Path) -> None:
    module = keras()
    a, b = module.layers.Input((2,), name="a"), module.layers.Input((3,), name="b")
    model = module.Model({"a": a, "b": b}, module.layers.Dense(1)(module.layers.concatenate([a, b])))
    model.compile(loss="mse")
    rows = [({"a": row[:2], "b": row[2:]}, float(y)) for row, y in pairs(8)]
    one = trainer(tmp_path, rows, model=model)
    one.train()
    assert one.predict([({"a": row["a"], "b": row["b"]},) for row, _ in rows]).predictions.shape == (8, 1)


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
        order = np.random.default_rng(seed).permutation(size)
        return FakeTf([self.rows[index] for index in order])


@pytest.mark.parametrize("kind", [Once, Sized, FakeTf])
def test_any_iterable_trains_evaluates_and_predicts(kind: Any, tmp_path: Path) -> None:
    steps = {} if kind is not Once else {"max_steps": 6}
    one = trainer(tmp_path / "one", kind(pairs(12)), eval_dataset=kind(pairs(6, seed=2)), **PLAIN, **steps)
    other = trainer(tmp_path / "other", pairs(12), eval_dataset=pairs(6, seed=2), **PLAIN)
    for each in (one, other):
        each.train()
    assert losses(one) == losses(other)
    assert one.evaluate()["eval_loss"] == other.evaluate()["eval_loss"]
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


# ------------------------------------------------------------------------------------------------------------ overrides
class Noting(TFTrainer):
    """Overrides every method with the parameters of the documents, and notes which are called."""

    called: ClassVar[set[str]] = set()

    def get_train_tfdataset(self) -> Any:
        self.called.add("get_train_tfdataset")
        x, y = arrays(8)
        return [(x[:4], y[:4]), (x[4:], y[4:])]

    def get_eval_tfdataset(self, eval_dataset: Any = None) -> Any:
        self.called.add("get_eval_tfdataset")
        return super().get_eval_tfdataset(eval_dataset)

    def get_test_tfdataset(self, test_dataset: Any) -> Any:
        self.called.add("get_test_tfdataset")
        return super().get_test_tfdataset(test_dataset)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.called.add("create_optimizer_and_scheduler")
        self.lr_scheduler = decay(num_training_steps)
        self.optimizer = keras().optimizers.SGD(self.lr_scheduler)

    def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:  # type: ignore[override]
        self.called.add("training_step")
        assert int(nb_instances_in_global_batch) == 4
        return super().training_step(features, labels, nb_instances_in_global_batch)

    def prediction_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:  # type: ignore[override]
        self.called.add("prediction_step")
        loss, logits = self.run_model(features, labels, False)
        self.eval_loss.update_state(loss)
        return logits

    def prediction_loop(  # type: ignore[override]
        self, dataset: Any, steps: Any, num_examples: Any, description: Any, prediction_loss_only: Any = None
    ) -> Any:
        self.called.add("prediction_loop")
        assert (steps, num_examples) == (1, 8)
        return super().prediction_loop(dataset, steps, num_examples, description, prediction_loss_only)

    def run_model(self, features: Any, labels: Any, training: bool) -> Any:
        self.called.add("run_model")
        return super().run_model(features, labels, training)

    def log(self, logs: Any) -> None:  # type: ignore[override]
        self.called.add("log")
        super().log(logs)

    def evaluate(self, eval_dataset: Any = None) -> Any:  # type: ignore[override]
        self.called.add("evaluate")
        return super().evaluate(eval_dataset)

    def predict(self, test_dataset: Any) -> Any:  # type: ignore[override]
        self.called.add("predict")
        return super().predict(test_dataset)

    def save_model(self, output_dir: Any = None) -> None:  # type: ignore[override]
        self.called.add("save_model")
        super().save_model(output_dir)

    def setup_wandb(self) -> None:
        self.called.add("setup_wandb")

    def setup_comet(self) -> None:
        self.called.add("setup_comet")

    def train(self, resume_from_checkpoint: Any = None) -> Any:  # type: ignore[override]
        self.called.add("train")
        return super().train(resume_from_checkpoint)


def test_every_documented_method_is_called_when_it_is_overridden(tmp_path: Path) -> None:
    Noting.called.clear()
    one = trainer(tmp_path, pairs(8), cls=Noting, eval_dataset=pairs(8), eval_strategy="epoch")
    one.train()
    assert isinstance(one.optimizer.keras_optimizer, keras().optimizers.SGD)
    assert "eval_loss" in one.evaluate() and "test_loss" in one.predict(pairs(8)).metrics
    one.save_model(str(tmp_path / "saved"))
    one.setup_wandb()
    one.setup_comet()
    assert Noting.called == {
        *("get_train_tfdataset", "get_eval_tfdataset", "get_test_tfdataset", "create_optimizer_and_scheduler"),
        *("training_step", "prediction_step", "prediction_loop", "run_model", "log", "evaluate", "predict"),
        *("save_model", "setup_wandb", "setup_comet", "train"),
    }


def test_a_training_step_may_compute_its_gradients_itself(tmp_path: Path) -> None:
    """The older way: the loss of every sample, divided by the items of the global batch."""

    class Mine(TFTrainer):
        def training_step(self, features: Any, labels: Any, nb: Any) -> Any:  # type: ignore[override]
            logits = self.model_wrapped(features, training=True)
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none") / nb
            loss.sum().backward()
            return loss

    given: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **PLAIN}
    mine, plain = (trainer(tmp_path / c.__name__, pairs(10), cls=c, **given) for c in (Mine, TFTrainer))
    for each in (mine, plain):
        each.train()
    np.testing.assert_allclose(losses(mine), losses(plain), rtol=1e-5)


def test_a_training_step_that_returns_nothing_is_refused(tmp_path: Path) -> None:
    class Mine(TFTrainer):
        def training_step(self, features: Any, labels: Any, nb: Any) -> Any:  # type: ignore[override]
            super().training_step(features, labels, nb)

    with pytest.raises(CodeError, match="must return the loss"):
        trainer(tmp_path, pairs(8), cls=Mine).train()


@pytest.mark.parametrize("name", ["apply_gradients", "distributed_training_steps", "distributed_prediction_steps"])
def test_an_override_that_would_not_be_called_is_refused(name: str, tmp_path: Path) -> None:
    mine = type("Mine", (TFTrainer,), {name: lambda self, *args: None})
    with pytest.raises(ConfigError, match=f"Mine.{name}.*Override"):
        trainer(tmp_path, pairs(8), cls=mine)


def test_apply_gradients_steps_outside_of_training(tmp_path: Path) -> None:
    one = trainer(tmp_path, pairs(8), **PLAIN)
    other = trainer(tmp_path / "other", pairs(8), num_train_epochs=1, **PLAIN)
    other.train()
    x, y = arrays(8)
    one.create_optimizer_and_scheduler(2)
    for start in (0, 4):
        batch = torch.from_numpy(x[start : start + 4]), torch.from_numpy(y[start : start + 4])
        one.apply_gradients(*batch, 4)
    for name, value in weights(one).items():
        np.testing.assert_allclose(value, weights(other)[name], rtol=1e-6, err_msg=name)


def test_a_writer_gets_the_log(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.names: set[str] = set()

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.names.add(name)

        def add_text(self, *args: Any) -> None: ...

        def flush(self) -> None: ...

    writer = Writer()
    trainer(tmp_path, pairs(8), tb_writer=writer).train()
    assert "train/loss" in writer.names


# ------------------------------------------------------------------------------------------------ saving and callbacks
def test_saved_weights_fit_a_model_of_the_same_code_in_any_process(tmp_path: Path) -> None:
    """Keras numbers layers through the process: the second model here has other names than the first one."""
    one = trainer(tmp_path, pairs(8), save_strategy="epoch")
    one.train()
    one.save_model(str(tmp_path / "saved"))
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == {
        f"_torch_params.sequential/dense{n}/{part}" for n in ("", "_1") for part in ("kernel", "bias")
    }
    again = trainer(tmp_path / "again", pairs(8))
    again.model.load_state_dict(saved)
    x, _ = arrays(5)
    np.testing.assert_array_equal(again.model.predict(x, verbose=0), one.model.predict(x, verbose=0))
    resumed = trainer(tmp_path, pairs(8), num_train_epochs=3, save_strategy="epoch")
    resumed.train(resume_from_checkpoint=True)
    assert int(resumed.optimizer.iterations) == 6


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    one = trainer(tmp_path, pairs(24), eval_dataset=pairs(24, seed=1), learning_rate=0.3, num_train_epochs=4, **given)
    one.train()
    assert one.evaluate()["eval_loss"] == pytest.approx(one.state.best_metric, rel=1e-6)


def test_callbacks_see_the_keras_model_and_metrics_the_predictions(tmp_path: Path) -> None:
    seen: list[Any] = []

    class See(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append((given["model"], given["optimizer"]))

    def accuracy(p: Any) -> dict[str, float]:
        return {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())}

    one = trainer(tmp_path, pairs(32), eval_dataset=pairs(16, seed=1), callbacks=[See()], compute_metrics=accuracy)
    one.train()
    assert seen[0] == (one.model, one.optimizer)
    x, y = arrays(16, seed=1)
    expected = float((one.model.predict(x, verbose=0).argmax(1) == y).mean())
    assert one.evaluate()["eval_accuracy"] == expected


# ------------------------------------------------------------------------------------------------------------ bad input
def test_bad_input_is_refused_with_a_way_out(tmp_path: Path) -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, "trains Keras models", {"model": torch.nn.Linear(2, 2)}),
        (ConfigError, "label_smoothing_factor", {"label_smoothing_factor": 0.1}),
        (ConfigError, "past_index", {"past_index": 1}),
        (ConfigError, "bf16_full_eval", {"bf16_full_eval": True}),
        (ConfigError, "another schedule", {"optimizers": (keras().optimizers.Adam(decay(3)), decay(4))}),
        (ConfigError, "must be a Keras schedule", {"optimizers": (keras().optimizers.Adam(0.1), lambda step: 0.1)}),
        (ConfigError, "use_ema", {"optimizers": (keras().optimizers.Adam(0.1, use_ema=True), None)}),
        (DataError, "not a set of pairs", {"data": arrays(8)}),
    ]
    for error, text, given in cases:
        data = given.pop("data", pairs(8))
        with pytest.raises(error, match=text) as caught:
            trainer(tmp_path, data, **given)
        assert caught.value.remedy  # type: ignore[attr-defined]


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    optimizer = keras().optimizers.Adam(0.1)
    trainer(tmp_path, pairs(8), optimizers=(optimizer, None)).train()
    with pytest.raises(ConfigError, match="built for the variables of another model"):
        trainer(tmp_path, pairs(8), optimizers=(optimizer, None))


def test_a_model_without_a_loss_and_a_batch_without_labels_are_named(tmp_path: Path) -> None:
    model = keras().Sequential([keras().layers.Dense(3)])
    with pytest.raises(ConfigError, match="has no loss"):
        trainer(tmp_path / "a", pairs(8), model=model).train()
    with pytest.raises(ConfigError, match="no labels"):
        trainer(tmp_path / "b", [(row,) for row, _ in pairs(8)]).train()
    with pytest.raises(DataError, match="3 parts"):
        trainer(tmp_path / "c", [(row, label, 1.0) for row, label in pairs(8)]).train()
    with pytest.raises(ConfigError, match="no sample to build it with"):
        trainer(tmp_path / "d", None, model=keras().Sequential([keras().layers.Dense(3)]))


@pytest.mark.parametrize("name", ["tpu_name", "tpu_zone", "gcp_project"])
def test_arguments_of_a_tpu_are_refused(name: str) -> None:
    """`tpu_name`, `tpu_zone`, `gcp_project`."""
    given: Any = {name: "here"}
    with pytest.raises(ConfigError, match=name) as caught:
        TFTrainingArguments("out", **given)
    assert caught.value.remedy


def test_the_arguments_have_the_older_members() -> None:
    args = TFTrainingArguments("out", use_cpu=True)
    with args.strategy.scope() as strategy:
        assert strategy.num_replicas_in_sync == args.n_replicas == args.n_gpu == 1
        assert strategy.experimental_distribute_dataset([1]) == [1] and strategy.run(max, args=(1, 2)) == 2
    with pytest.raises(ConfigError, match="xla"):
        TFTrainingArguments("out", xla=True)


def test_the_arguments_of_a_trainer_will_do(tmp_path: Path) -> None:
    from trainer_lib import TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, disable_tqdm=True, save_strategy="no")
    TFTrainer(classifier(), args, pairs(8)).train()
    assert keras_toys.arguments(tmp_path).poly_power == 1.0
