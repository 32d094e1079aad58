"""Several processes train a Keras model like one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.distributed import loaded, run_distributed

pytestmark = [
    pytest.mark.needs("keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded("keras", "transformers.modeling_utils", KERAS_BACKEND="torch"):
        yield


def train(folder: str, dropout: float = 0.0, norm: bool = False, stop: int = 0, **given: Any) -> dict[str, Any]:
    from tests.support.keras_toys import classifier, keras, losses, pairs, trainer, weights
    from tests.support.training import StopAt, preempted_at
    from trainer_lib.trainer.seed_states import capture_seeds

    schedule = keras().optimizers.schedules.PolynomialDecay(1e-2, 8, 0.0)
    settings: dict[str, Any] = {
        "global_batch_size": 6,
        "per_device_train_batch_size": 2,
        "optimizers": (keras().optimizers.Adam(schedule), schedule),
        "callbacks": [StopAt(stop)] if stop else [],
        **given,
    }
    data = {"model": classifier(dropout, norm=norm), "eval_dataset": pairs(11, seed=1)}
    resume = settings.pop("resume", None)
    one = trainer(folder, pairs(23), **data, **settings)
    if stop:
        return {"stopped": preempted_at(one)}
    one.train(resume_from_checkpoint=resume)
    seeds = capture_seeds(one.model)
    loss, predicted = one.evaluate()["eval_loss"], one.predict(pairs(7)).predictions
    rows = 0 if predicted is None else len(predicted)
    return {"weights": weights(one), "losses": losses(one), "seeds": seeds, "loss": loss, "rows": rows}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["weights"].keys() == other["weights"].keys()
    for name, value in one["weights"].items():
        if "seed" not in name:
            np.testing.assert_array_equal(value, other["weights"][name], err_msg=name)


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """Ranks with unequal micro-batches, a last step of 5 samples, a given Keras optimizer."""
    alone = train(str(tmp_path / "one"))
    ranks = run_distributed(train, 2, str(tmp_path / "two"))
    same(*ranks)
    for name, value in alone["weights"].items():
        np.testing.assert_allclose(ranks[0]["weights"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-5)
    assert ranks[0]["loss"] == ranks[1]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert [ranks[0]["rows"], alone["rows"]] == [7, 7]


def test_ranks_draw_dropout_of_their_own_and_resume_exactly(tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100}
    whole = run_distributed(train, 2, str(tmp_path / "whole"), 0.5, True)
    assert whole[0]["seeds"] != whole[1]["seeds"]
    cut = run_distributed(stopped, 2, str(tmp_path / "cut"), given)
    assert 0 < cut[0]["stopped"] < 8
    resumed = run_distributed(resumed_from, 2, str(tmp_path / "cut"), given)
    for one, other in zip(whole, resumed, strict=True):
        same(one, other)
        assert one["losses"] == other["losses"] and one["seeds"] == other["seeds"]


def stopped(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    return train(folder, 0.5, True, stop=3, **given)


def resumed_from(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    return train(folder, 0.5, True, resume=True, **given)


def test_a_sharded_model_is_refused(tmp_path: Path) -> None:
    for found in run_distributed(sharded, 2, str(tmp_path)):
        assert found.startswith("fsdp = full_shard") and "replicated" in found


def sharded(folder: str) -> str:
    from trainer_lib.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        train(folder, fsdp="full_shard")
    return str(caught.value)
