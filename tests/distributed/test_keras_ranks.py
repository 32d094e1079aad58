"""Several processes train a Keras model like one; each draws dropout of its own, and they resume exactly."""

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


def train(folder: str, dropout: float = 0.0, norm: bool = False, stop: int = 0, **settings: Any) -> dict[str, Any]:
    from tests.support.keras_toys import classifier, keras, pairs, trainer, weights
    from tests.support.training import StopAt, losses, preempted_at
    from trainer_lib.trainer.model.seeding import capture_seeds

    schedule = keras().optimizers.schedules.PolynomialDecay(1e-2, 8, 0.0)
    resume = settings.pop("resume", None)
    training = trainer(
        folder,
        pairs(23),
        model=classifier(dropout, norm=norm),
        eval_dataset=pairs(11, seed=1),
        optimizers=(keras().optimizers.Adam(schedule), schedule),
        callbacks=[StopAt(stop)] if stop else [],
        **{"global_batch_size": 6, "per_device_train_batch_size": 2, **settings},
    )
    if stop:
        return {"stopped": preempted_at(training)}
    training.train(resume_from_checkpoint=resume)
    seeds = capture_seeds(training.model)
    loss, predicted = training.evaluate()["eval_loss"], training.predict(pairs(7)).predictions
    rows = 0 if predicted is None else len(predicted)
    return {"weights": weights(training), "losses": losses(training), "seeds": seeds, "loss": loss, "rows": rows}


def trainings(folder: str) -> dict[str, Any]:
    """All that one group of processes trains: what it imports takes longer than they do."""
    from trainer_lib.errors import ConfigError

    with pytest.raises(ConfigError, match=r"fsdp = full_shard.*replicated"):
        train(f"{folder}/sharded", fsdp="full_shard")
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100}
    return {
        "plain": train(f"{folder}/plain"),
        "whole": train(f"{folder}/whole", 0.5, True),
        "cut": train(f"{folder}/cut", 0.5, True, stop=3, **saves)["stopped"],
        "resumed": train(f"{folder}/cut", 0.5, True, resume=True, **saves),
    }


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["weights"].keys() == theirs["weights"].keys()
    for name, value in mine["weights"].items():
        if "seed" not in name:
            np.testing.assert_array_equal(value, theirs["weights"][name], err_msg=name)


def test_two_processes_train_like_one_and_resume_exactly(tmp_path: Path) -> None:
    """Ranks with unequal micro-batches, a last step of 5 samples, a given Keras optimizer."""
    alone = train(str(tmp_path / "one"))
    first, second = run_distributed(trainings, 2, str(tmp_path / "two"))
    same(first["plain"], second["plain"])
    for name, value in alone["weights"].items():
        np.testing.assert_allclose(first["plain"]["weights"][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(first["plain"]["losses"], alone["losses"], rtol=1e-5)
    assert first["plain"]["loss"] == second["plain"]["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert [first["plain"]["rows"], alone["rows"]] == [7, 7]
    assert first["whole"]["seeds"] != second["whole"]["seeds"]
    for rank in (first, second):
        assert 0 < rank["cut"] < 8
        same(rank["whole"], rank["resumed"])
        assert rank["whole"]["losses"] == rank["resumed"]["losses"]
        assert rank["whole"]["seeds"] == rank["resumed"]["seeds"]
