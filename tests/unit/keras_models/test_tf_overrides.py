"""What a subclass of `TFTrainer` overrides, its arguments, what callbacks and saved models get, and what is refused."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.keras_toys import (
    PLAIN,
    arrays,
    built,
    classifier,
    decay,
    keras,
    keras_model,
    pairs,
    trained,
    trainer,
    weights,
)
from tests.support.repository import ROOT
from tests.support.training import accuracy, losses
from trainer_lib import TFTrainer, TFTrainingArguments, TrainerCallback, TrainingArguments
from trainer_lib.errors import CodeError, ConfigError, DataError

pytestmark = [
    pytest.mark.needs("keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]
SGD = {"optimizer": "sgd"}


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
    one = trained(tmp_path, pairs(8), cls=Noting, eval_dataset=pairs(8), eval_strategy="epoch")
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
    mine, plain = (trained(tmp_path / c.__name__, pairs(10), cls=c, **given) for c in (Mine, TFTrainer))
    np.testing.assert_allclose(losses(mine), losses(plain), rtol=1e-5)


@pytest.mark.parametrize("name", ["apply_gradients", "distributed_training_steps", "distributed_prediction_steps"])
def test_an_override_that_would_not_be_called_is_refused(name: str, tmp_path: Path) -> None:
    mine = type("Mine", (TFTrainer,), {name: lambda self, *args: None})
    with pytest.raises(ConfigError, match=f"Mine.{name}.*Override"):
        trainer(tmp_path, pairs(8), cls=mine)
    nothing = type("Nothing", (TFTrainer,), {"training_step": lambda self, features, labels, items: None})
    with pytest.raises(CodeError, match="must return the loss"):
        trainer(tmp_path, pairs(8), cls=nothing).train()


def test_a_writer_gets_the_log(tmp_path: Path) -> None:
    names: list[str] = []
    nothing = dict.fromkeys(("add_text", "flush"), lambda *_: None)
    trainer(tmp_path, pairs(8), tb_writer=SimpleNamespace(add_scalar=lambda n, *_: names.append(n), **nothing)).train()
    assert "train/loss" in names


def test_saved_weights_fit_a_model_of_the_same_code_in_any_process(tmp_path: Path) -> None:
    """Keras numbers layers through the process: the second model here has other names than the first one."""
    adam = keras().optimizers.Adam
    one = trained(tmp_path, pairs(8), save_strategy="epoch", optimizers=(adam(0.1), None))
    one.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    parts = enumerate(("kernel", "bias") * 2)
    assert set(saved) == {f"_torch_params.{place}/sequential/dense/{part}" for place, part in parts}
    again = trainer(tmp_path / "again", pairs(8))
    again.model.load_state_dict(saved)
    x, _ = arrays(5)
    np.testing.assert_array_equal(again.model.predict(x, verbose=0), one.model.predict(x, verbose=0))
    resumed = trainer(tmp_path, pairs(8), num_train_epochs=3, save_strategy="epoch", optimizers=(adam(0.1), None))
    resumed.train(resume_from_checkpoint=True)
    assert int(resumed.optimizer.iterations) == 6
    other = trainer(tmp_path, pairs(8), optimizers=(keras().optimizers.SGD(0.1), None))
    with pytest.raises(ConfigError, match="another Keras optimizer"):
        other.train(resume_from_checkpoint=True)


def test_layers_of_one_name_are_all_trained_and_saved(tmp_path: Path) -> None:
    module, model = keras(), keras_model()

    class Twins(model):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (module.layers.Dense(size, name="twin") for size in (5, 3))

        def call(self, x: Any) -> Any:
            return self.other(self.one(x))

    twins = built(Twins(), arrays(1)[0])
    twins.compile(loss=module.losses.SparseCategoricalCrossentropy(from_logits=True))
    one = trainer(tmp_path, pairs(8), model=twins, optimizers=(module.optimizers.Adam(0.1), None))
    assert len(list(twins.parameters())) == 4
    before = weights(one)
    one.train()
    assert all((value != before[name]).any() for name, value in weights(one).items())


def test_the_best_model_is_loaded_and_callbacks_and_metrics_see_the_keras_model(tmp_path: Path) -> None:
    seen: list[Any] = []

    class See(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append((given["model"], given["optimizer"]))

    given: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    given |= {"learning_rate": 0.3, "num_train_epochs": 4, "callbacks": [See()], "compute_metrics": accuracy}
    one = trained(tmp_path, pairs(24), eval_dataset=pairs(24, seed=1), **given)
    measured = one.evaluate()
    assert measured["eval_loss"] == pytest.approx(one.state.best_metric, rel=1e-6)
    assert seen[0] == (one.model, one.optimizer)
    x, y = arrays(24, seed=1)
    assert measured["eval_accuracy"] == float((one.model.predict(x, verbose=0).argmax(1) == y).mean())


# -- arguments, and what is refused -----------------------------------------------------------------------------------
def test_bad_input_is_refused_with_a_way_out(tmp_path: Path) -> None:
    own: Any = type("Own", (keras_model(),), {"train_step": lambda self, data: None})
    lossless = keras().Sequential([keras().layers.Input((5,)), keras().layers.Dense(3)])
    used = keras().optimizers.Adam(0.1)
    trainer(tmp_path, pairs(8), optimizers=(used, None)).train()
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, "trains Keras models", {"model": torch.nn.Linear(2, 2)}),
        (ConfigError, "label_smoothing_factor", {"label_smoothing_factor": 0.1}),
        (ConfigError, "poly_power", {"poly_power": 2.0, "lr_scheduler_type": "cosine"}),
        (ConfigError, "cannot follow it", {"optimizers": (None, decay(4))}),
        (ConfigError, "add_scalar", {"tb_writer": print}),
        (ConfigError, "past_index", {"past_index": 1}),
        (ConfigError, "bf16_full_eval", {"bf16_full_eval": True}),
        (ConfigError, "another schedule", {"optimizers": (keras().optimizers.Adam(decay(3)), decay(4))}),
        (ConfigError, "must be a Keras schedule", {"optimizers": (keras().optimizers.Adam(0.1), lambda step: 0.1)}),
        (ConfigError, "use_ema", {"optimizers": (keras().optimizers.Adam(0.1, use_ema=True), None)}),
        (ConfigError, "built for the variables of another model", {"optimizers": (used, None)}),
        (ConfigError, r"overrides train_step.*Override training_step", {"model": own()}),
        (ConfigError, "is not built.*call it once", {"model": keras().Sequential([keras().layers.Dense(3)])}),
        (ConfigError, "has no loss", {"model": lossless}),
        (ConfigError, "no labels", {"data": [(row,) for row, _ in pairs(8)]}),
        (DataError, "3 parts", {"data": [(row, label, 1.0) for row, label in pairs(8)]}),
        (DataError, "not a set of pairs", {"data": arrays(8)}),
        (DataError, "not a set of pairs", {"data": dict(zip(("x", "labels"), arrays(8), strict=True))}),
        (DataError, "not a set of pairs", {"data": (*arrays(8), arrays(8)[1])}),
        (ConfigError, "callbacks = EarlyStopping.*TrainerCallback", {"callbacks": [keras().callbacks.EarlyStopping()]}),
        (ConfigError, "compute_metrics = MeanSq", {"compute_metrics": keras().metrics.MeanSquaredError()}),
    ]
    for error, text, given in cases:
        data = given.pop("data", pairs(8))
        with pytest.raises(error, match=text) as caught:
            trainer(tmp_path, data, **given).train()
        assert caught.value.remedy  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("compiled", "uses", "says"),
    [(SGD, False, True), ({"metrics": ["mae"]}, True, True), ({}, False, False), (SGD, True, False)],
)
def test_what_compile_was_given_in_vain_is_named(compiled: Any, uses: bool, says: bool, tmp_path: Path) -> None:
    model = classifier()
    model.compile(loss=model.loss, **compiled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, pairs(8), model=model, optimizers=(model.optimizer if uses else None, None))
    assert any("give optimizers=(model.optimizer, None)" in str(warning.message) for warning in caught) == says


def test_sets_of_batches_are_refused(tmp_path: Path) -> None:
    base: Any = keras().utils.PyDataset

    class Batches(base):  # type: ignore[misc]
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return arrays(4, seed=index)

    rows: Any = pairs(8)
    sets: list[Any] = [Batches(), torch.utils.data.DataLoader(rows, batch_size=4)]
    for data in sets:
        with pytest.raises(DataError, match=r"items are batches.*get_train_tfdataset"):
            trainer(tmp_path, data)

    class Mine(TFTrainer):
        def get_train_tfdataset(self) -> Any:
            return Batches()

    trainer(tmp_path, None, cls=Mine).train()


def test_the_arguments_have_the_older_members_but_for_those_of_a_tpu() -> None:
    for name in ("tpu_name", "tpu_zone", "gcp_project"):
        given: Any = {name: "here"}
        with pytest.raises(ConfigError, match=name) as caught:
            TFTrainingArguments("out", **given)
        assert caught.value.remedy, name
    args = TFTrainingArguments("out", use_cpu=True)
    with args.strategy.scope() as strategy:
        assert strategy.num_replicas_in_sync == args.n_replicas == args.n_gpu == 1
        assert strategy.experimental_distribute_dataset([1]) == [1] and strategy.run(max, args=(1, 2)) == 2
    with pytest.raises(ConfigError, match="xla"):
        TFTrainingArguments("out", xla=True)


def test_the_arguments_of_a_trainer_will_do(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, disable_tqdm=True, save_strategy="no")
    TFTrainer(classifier(), args, pairs(8)).train()


def test_the_pages_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(block)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0.9
    assert (tmp_path / "out" / "checkpoint-96" / "COMMIT.json").exists()
