"""Keras runs on torch, or a TFTrainer says what to do. Keras itself is not needed here."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch

from trainer_lib import TFTrainer, TFTrainingArguments
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.keras_models.keras_backend import choose_torch, import_keras, is_keras_model


def test_another_backend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = types.SimpleNamespace(backend=lambda: "tensorflow")
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(config=config))
    with pytest.raises(ConfigError, match=r"KERAS_BACKEND = tensorflow: .*import TFTrainer before keras"):
        TFTrainer(torch.nn.Linear(1, 1), TFTrainingArguments(str(tmp_path)), [])
    assert not is_keras_model(torch.nn.Linear(1, 1))


def test_a_backend_of_the_environment_is_refused_and_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)  # as if the import of its backend failed
    for backend, error, words in (
        ("jax", ConfigError, "KERAS_BACKEND = jax"),
        ("torch", MissingExtraError, r"trainflow\[keras\]"),
    ):
        monkeypatch.setenv("KERAS_BACKEND", backend)
        choose_torch()
        assert os.environ["KERAS_BACKEND"] == backend
        with pytest.raises(error, match=words):
            import_keras()
