"""A real `tf.data.Dataset` trains like the same samples in a list, and a writer of TensorFlow gets the log."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.keras_toys import arrays, classifier, losses, pairs, trainer
from tests.support.resuming import prove
from trainer_lib import TFTrainer

pytestmark = [
    pytest.mark.needs("keras"),
    pytest.mark.needs("tensorflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # TensorFlow's own
]
IN_ORDER = {"train_sampling_strategy": "sequential"}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import TensorFlow before a test is watched: it sets variables of the environment for the whole process."""
    importlib.import_module("tensorflow")


def dataset(count: int) -> Any:
    import tensorflow

    return tensorflow.data.Dataset.from_tensor_slices(arrays(count))


def test_it_trains_and_evaluates_like_a_list(tmp_path: Path) -> None:
    one = trainer(tmp_path / "one", dataset(24), eval_dataset=dataset(24).take(10), **IN_ORDER)
    other = trainer(tmp_path / "other", pairs(24), eval_dataset=pairs(24)[:10], **IN_ORDER)
    for each in (one, other):
        each.train()
    assert losses(one) == losses(other)
    assert one.evaluate()["eval_loss"] == other.evaluate()["eval_loss"]
    assert one.predict(dataset(5)).predictions.tolist() == other.predict(pairs(5)).predictions.tolist()


def test_batches_of_an_override_may_repeat_forever(tmp_path: Path) -> None:
    class Mine(TFTrainer):
        def get_train_tfdataset(self) -> Any:
            return self.train_dataset.repeat().batch(4)

        def get_eval_tfdataset(self, eval_dataset: Any = None) -> Any:
            return self.eval_dataset.repeat().batch(4), 3, 12

    one = trainer(tmp_path / "one", dataset(24), cls=Mine, eval_dataset=dataset(12), max_steps=12)
    other = trainer(tmp_path / "other", pairs(24), eval_dataset=pairs(12), **IN_ORDER)
    for each in (one, other):
        each.train()
    assert losses(one) == losses(other)
    assert one.evaluate()["eval_loss"] == pytest.approx(other.evaluate()["eval_loss"])


def test_a_shuffled_one_resumes_where_it_stopped(tmp_path: Path) -> None:
    def make(folder: Path, *callbacks: Any) -> Any:
        given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100}
        return trainer(folder, dataset(22), model=classifier(0.5), callbacks=callbacks, **given)

    prove(make, tmp_path, 8)


def test_a_writer_of_tensorflow_gets_the_log(tmp_path: Path) -> None:
    import tensorflow

    writer = tensorflow.summary.create_file_writer(str(tmp_path / "log"))
    trainer(tmp_path / "one", dataset(8), tb_writer=writer).train()
    writer.close()
    reading: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    assert "train/loss" in events.Tags()["tensors"]
