"""A notebook's function in this process, and what the launcher refuses to fork."""

from __future__ import annotations

import os
from typing import Any

import pytest

from trainer_lib.errors import ConfigError
from trainer_lib.launch import notebook_launcher


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)


def test_one_process_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(number: int) -> Any:
        return number, os.getpid(), os.environ["ACCELERATE_MIXED_PRECISION"]

    assert notebook_launcher(here, (7,), mixed_precision="bf16") == (7, os.getpid(), "bf16")
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ

    def raises() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        notebook_launcher(raises)


def test_what_cannot_be_forked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"processes = 3: This process may use 2 CPU core"):
        notebook_launcher(print, num_processes=3)
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="num_processes = 2: This process has used a GPU already") as caught:
        notebook_launcher(print, num_processes=2)
    assert caught.value.remedy is not None
