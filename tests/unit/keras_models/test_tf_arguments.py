"""The arguments of a `TFTrainer`, what it refuses, and the example of its page."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import keras_toys
from tests.support.keras_toys import arrays, classifier, decay, keras, keras_model, pairs, trainer
from tests.support.repository import ROOT
from trainer_lib import TFTrainer, TFTrainingArguments, Trainer
from trainer_lib.errors import ConfigError, DataError

pytestmark = [
    pytest.mark.needs("keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]


def test_bad_input_is_refused_with_a_way_out(tmp_path: Path) -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, "trains Keras models", {"model": torch.nn.Linear(2, 2)}),
        (ConfigError, "label_smoothing_factor", {"label_smoothing_factor": 0.1}),
        (ConfigError, "poly_power", {"poly_power": 2.0, "optim": "sgd"}),
        (ConfigError, "cannot follow it", {"optimizers": (None, decay(4)), "optim": "sgd"}),
        (ConfigError, "add_scalar", {"tb_writer": print}),
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
            trainer(tmp_path, data, **given).train()
        assert caught.value.remedy  # type: ignore[attr-defined]


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


def test_a_training_step_of_the_model_is_refused(tmp_path: Path) -> None:
    model = keras_model()

    class Own(model):  # type: ignore[misc, valid-type]
        def train_step(self, data: Any) -> Any: ...

    with pytest.raises(ConfigError, match=r"overrides train_step.*Override training_step"):
        trainer(tmp_path, pairs(4), model=Own())


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


def test_the_power_of_the_decay_is_refused_by_a_trainer(tmp_path: Path) -> None:
    args = keras_toys.arguments(tmp_path, poly_power=2.0)
    with pytest.raises(ConfigError, match=r"poly_power = 2.0: .*Use TFTrainer"):
        Trainer(torch.nn.Linear(2, 2), args, train_dataset=pairs(4))


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


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(block)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0.9
    assert (tmp_path / "out" / "checkpoint-96" / "COMMIT.json").exists()
