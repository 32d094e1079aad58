"""What a subclass of `TFTrainer` overrides, and what callbacks, checkpoints and saved models get."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.support.keras_toys import PLAIN, arrays, decay, keras, keras_model, losses, pairs, trainer, weights
from trainer_lib import TFTrainer, TrainerCallback
from trainer_lib.errors import CodeError, ConfigError

pytestmark = [
    pytest.mark.needs("keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]


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


def test_layers_of_one_name_are_all_trained_and_saved(tmp_path: Path) -> None:
    module, model = keras(), keras_model()

    class Twins(model):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (module.layers.Dense(size, name="twin") for size in (5, 3))

        def call(self, x: Any) -> Any:
            return self.other(self.one(x))

    twins = Twins()
    twins.compile(loss=module.losses.SparseCategoricalCrossentropy(from_logits=True))
    one = trainer(tmp_path, pairs(8), model=twins, optimizers=(module.optimizers.Adam(0.1), None))
    assert len(list(twins.parameters())) == 4
    before = weights(one)
    one.train()
    assert all((value != before[name]).any() for name, value in weights(one).items())
    assert {len(slots) for slots in one.optimizer.state.values()} == {2}


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
