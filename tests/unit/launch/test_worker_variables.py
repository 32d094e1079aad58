"""Variables that every worker is started with."""

from __future__ import annotations

import pytest

from trainer_lib.launch import LaunchConfig, resolve_config
from trainer_lib.launch.variables import worker_environment


def test_threads_sleep_while_they_wait_unless_the_user_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of OpenMP that spin take the cores from the command that waits for them."""
    config = resolve_config(LaunchConfig(processes=1))
    assert worker_environment(config, {})["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in worker_environment(config, {"GOMP_SPINCOUNT": "1000"})
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert worker_environment(config, {})["OMP_WAIT_POLICY"] == "ACTIVE"
