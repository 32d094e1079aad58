"""Without torch nothing is started, and the error names the extra that brings it."""

from __future__ import annotations

import importlib.util

import pytest

from trainer_lib.errors import MissingExtraError
from trainer_lib.launch.installed import check_installed, require_torch


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_torch()
    check_installed("accelerate")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'torch is not installed here.*pip install "trainflow\[torch\]"'):
        require_torch()
    with pytest.raises(MissingExtraError, match=r'train.launch.kind = accelerate.*pip install "trainflow\[torch\]"'):
        check_installed("accelerate")
    with pytest.raises(MissingExtraError, match=r'pip install "trainflow\[deepspeed\]"'):
        check_installed("deepspeed")
    check_installed("torchrun")
