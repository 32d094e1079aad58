"""hyperparameter_search(backend="ray") on a real Ray cluster, whose trials are processes of it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import python
from tests.support.ray_cluster import VARIABLES, RayCluster
from tests.support.repository import ROOT
from tests.support.searching import search_trainer
from trainer_lib import BestRun, TrainerCallback
from trainer_lib.errors import CodeError, ConfigError

pytestmark = [pytest.mark.needs("ray"), pytest.mark.timeout(300)]
RATES = [1e-5, 5e-2]


class Notes(TrainerCallback):
    """Writes down how every training begins, and may kill its process once at a step."""

    def __init__(self, file: Path, kill_at: int = -1) -> None:
        self.file, self.kill_at = file, kill_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rate = kwargs["optimizer"].param_groups[0]["lr"]
        noted = {"folder": Path(args.output_dir).name, "step": state.global_step, "rate": rate, "pid": os.getpid()}
        with self.file.open("a") as file:
            file.write(json.dumps({**noted, "asked": args.learning_rate, "params": state.trial_params}) + "\n")
        flag = self.file.with_suffix(".killed")
        if state.global_step == self.kill_at and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _tried(trial: Any) -> dict[str, Any]:
    from ray import tune

    assert trial is None
    return {"learning_rate": tune.grid_search(RATES)}


def _saving(folder: Path, notes: Path, kill_at: int = -1, **given: Any) -> Any:
    usual = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "lr_scheduler_type": "constant"}
    return search_trainer(folder, callbacks=[Notes(notes, kill_at)], **{**usual, **given})


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One machine of two CPUs beside the head."""
    cluster = RayCluster(2)
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    if "cluster" in request.fixturenames:
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("cluster").address)


def test_each_trial_is_exactly_a_training_with_its_values(tmp_path: Path, cluster: RayCluster) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    before, env = threading.active_count(), dict(os.environ)
    trainer = _saving(tmp_path / "search", tmp_path / "notes")
    best = trainer.hyperparameter_search(_tried, n_trials=1, backend="ray")
    assert isinstance(best, BestRun)
    alone = search_trainer(tmp_path / "alone", learning_rate=5e-2, max_steps=8, lr_scheduler_type="constant")
    alone.train()
    assert best.objective == pytest.approx(alone.evaluate()["eval_loss"], abs=1e-6)
    assert best.hyperparameters == {"learning_rate": 5e-2}
    assert [each["state"] for each in best.run_summary] == ["complete", "complete"]
    [found] = [each for each in best.run_summary if each["run_id"] == best.run_id]
    assert (tmp_path / "search" / found["folder"] / "checkpoint-8" / "COMMIT.json").exists()
    noted = _read(tmp_path / "notes")
    assert os.getpid() not in {each["pid"] for each in noted}
    assert all(each["params"] == {"learning_rate": each["asked"]} for each in noted)
    # Afterwards nothing of the search is left on this process, and the Trainer is as it was.
    assert trainer.hp_search_backend is None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert threading.active_count() == before
    assert {*os.environ.items()} ^ {*env.items()} == set()


def test_asha_ends_a_bad_trial_early(tmp_path: Path, cluster: RayCluster) -> None:
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    trainer = _saving(tmp_path / "out", tmp_path / "notes", save_strategy="no")
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": tune.grid_search(RATES[::-1])},
        lambda metrics: -metrics["eval_loss"],
        n_trials=1,
        direction="maximize",
        backend="ray",
        scheduler=ASHAScheduler(grace_period=1, reduction_factor=2),
        max_concurrent_trials=1,
    )
    good, bad = best.run_summary
    assert best.hyperparameters == {"learning_rate": 5e-2}
    assert (good["state"], good["step"]) == ("complete", 8)
    assert (bad["state"], bad["step"]) == ("pruned", 2)
    assert max(each["step"] for each in _read(tmp_path / "notes") if each["asked"] == 1e-5) < 4


def test_a_trial_of_a_population_goes_on_from_the_better_one_with_its_own_rate(
    tmp_path: Path, cluster: RayCluster
) -> None:
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"learning_rate": tune.loguniform(1e-5, 1.0)},
        quantile_fraction=0.5,
        resample_probability=0.0,
        synch=True,
    )
    trainer = _saving(tmp_path / "out", tmp_path / "notes")
    best = trainer.hyperparameter_search(_tried, n_trials=1, backend="ray", scheduler=scheduler)
    bad, good = best.run_summary
    assert {bad["state"], good["state"]} == {"complete"}
    noted = _read(tmp_path / "notes")
    taken = [each for each in noted if each["folder"].startswith(f"run-{bad['run_id']}-")]
    # It went on at the step of the better one's checkpoint, and trained at the rate that it was given.
    assert taken[0]["step"] == 4
    assert taken[0]["asked"] in (pytest.approx(0.06), pytest.approx(0.04))
    assert all(each["rate"] == pytest.approx(each["asked"]) for each in noted)
    assert taken[-1]["step"] == 7
    assert (tmp_path / "out" / bad["folder"] / "checkpoint-8").is_dir()
    assert abs(bad["objective"] - good["objective"]) < 0.1


def test_a_trial_whose_process_is_killed_goes_on_from_its_checkpoint(tmp_path: Path, cluster: RayCluster) -> None:
    best = {}
    for name, kill_at in (("whole", -1), ("killed", 5)):
        trainer = _saving(tmp_path / name, tmp_path / f"{name}.txt", kill_at)
        best[name] = trainer.hyperparameter_search(_space_of_one, n_trials=1, backend="ray")
    noted = _read(tmp_path / "killed.txt")
    first, second = dict.fromkeys(each["pid"] for each in noted)
    assert [each["step"] for each in noted if each["pid"] == first] == [0, 1, 2, 3, 4, 5]
    assert [each["step"] for each in noted if each["pid"] == second] == [4, 5, 6, 7]
    assert len({each["folder"] for each in noted}) == 1
    assert best["killed"].objective == best["whole"].objective


def _space_of_one(trial: Any) -> dict[str, Any]:
    return {"learning_rate": 0.05}


def test_an_error_that_no_other_values_help_ends_the_search(tmp_path: Path, cluster: RayCluster) -> None:
    trainer = search_trainer(tmp_path, compute_metrics=_raises)
    with pytest.raises(CodeError, match="KeyError: 'gone'"):
        trainer.hyperparameter_search(_tried, n_trials=2, backend="ray")


def _raises(prediction: Any) -> dict[str, float]:
    raise KeyError("gone")


def test_a_trial_that_diverges_fails_alone(tmp_path: Path, cluster: RayCluster) -> None:
    from ray import tune

    trainer = search_trainer(tmp_path, max_nonfinite_steps=1, max_grad_norm=0.0, max_steps=8)
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": tune.grid_search([1e38, 0.01])}, n_trials=1, backend="ray"
    )
    assert [each["state"] for each in best.run_summary] == ["fail", "complete"]
    assert best.hyperparameters == {"learning_rate": 0.01}


def test_more_than_the_cluster_offers_is_refused(tmp_path: Path, cluster: RayCluster) -> None:
    with pytest.raises(ConfigError, match=r"The cluster offers CPU 0; CPU 2, by machine; each trial asks CPU 3"):
        search_trainer(tmp_path).hyperparameter_search(
            _tried, n_trials=1, backend="ray", resources_per_trial={"cpu": 3}
        )


def test_no_cluster_at_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    begun = time.monotonic()
    trainer = _saving(tmp_path / "out", tmp_path / "notes")
    with pytest.raises(ConfigError, match="cluster") as caught:
        trainer.hyperparameter_search(_tried, n_trials=1, backend="ray")
    assert (caught.value.field, caught.value.value) == ("RAY_ADDRESS", "127.0.0.1:1")
    assert caught.value.remedy
    assert not (tmp_path / "notes").exists()
    assert time.monotonic() - begun < 120  # Ray itself tries for more than five minutes


def test_what_cannot_travel_is_named(tmp_path: Path, cluster: RayCluster) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"compute_metrics = function: It cannot be sent .*lock"):
        search_trainer(tmp_path, compute_metrics=lambda p: {"a": float(lock.locked())}).hyperparameter_search(
            _tried, n_trials=1, backend="ray"
        )


_SCRIPT = """
import sys
from pathlib import Path
from tests.support.searching import HELD_OUT, ROWS, fresh
from trainer_lib import Trainer, TrainerCallback, TrainingArguments

class Mine(Trainer):
    def __init__(self, *args, weight=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = weight

    def evaluate(self, *args, **kwargs):
        return {"eval_weighted": self.weight * super().evaluate(*args, **kwargs)["eval_loss"]}

class Watching(TrainerCallback):
    def __init__(self, trainer, folder):
        self.trainer, self.folder = trainer, folder

    def on_train_end(self, args, state, control, **kwargs):
        Path(self.folder, f"seen-{self.trainer.weight}-{self.trainer.state.global_step}").touch()

if __name__ == "__main__":
    given = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "use_cpu": True, "report_to": "none"}
    args = TrainingArguments(sys.argv[1], **given)
    trainer = Mine(model_init=fresh, args=args, train_dataset=ROWS, eval_dataset=HELD_OUT, weight=2.0)
    trainer.weight = 3.0
    trainer.add_callback(Watching(trainer, sys.argv[1]))
    best = trainer.hyperparameter_search(n_trials=2, backend="ray")
    print("best", sorted(best.hyperparameters), best.run_summary[0]["state"])
"""


def test_a_script_of_its_own_needs_no_cluster(tmp_path: Path) -> None:
    """What is in the script itself travels: a subclass, what was set on it, a callback that refers to it."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as short:  # paths of Ray's sockets are short
        done = python("script.py", tmp_path / "out", cwd=tmp_path, env={"TMPDIR": short})
    names = ["learning_rate", "num_train_epochs", "per_device_train_batch_size", "seed"]
    assert f"best {names} complete" in done.stdout
    assert (tmp_path / "out" / "seen-3.0-2").exists()
