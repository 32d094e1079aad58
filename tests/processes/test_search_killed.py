"""A search goes on after the process of a trial was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.searching import rate, search_trainer

_KILLED = """
import os, sys
import optuna
study = optuna.create_study(storage=sys.argv[1], study_name="s")
trial = study.ask()
trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)
import socket
trial.set_user_attr("trainflow:process", f"{socket.gethostname()}:{os.getpid()}")
trial.set_user_attr("trainflow:folder", "run-0")
os.kill(os.getpid(), 9)
"""


def test_a_trial_whose_process_was_killed_is_tried_again(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/s.db"
    killed = subprocess.run([sys.executable, "-c", _KILLED, storage], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    best = search_trainer(tmp_path).hyperparameter_search(
        rate, n_trials=1, storage=storage, study_name="s", load_if_exists=True
    )
    assert [each["state"] for each in best.run_summary] == ["fail", "complete"]
    assert best.run_summary[0]["hyperparameters"] == best.hyperparameters
