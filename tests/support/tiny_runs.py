"""Fixtures around `tests.support.tiny`: its data, prepared once, and the weights of a run that was not disturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.once import once_per_run

if TYPE_CHECKING:
    from trainer_lib.protocol.requests import PreparedData

# Imported inside the fixtures: fsspec reads the environment at import, after tests/conftest.py has set the sandbox up.


@pytest.fixture(scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """The recipe's data, as requests describe it."""
    from tests.support import tiny
    from trainer_lib.base.records import from_record, to_record
    from trainer_lib.protocol.requests import PreparedData

    def prepare(folder: Path) -> None:
        (folder / "record.json").write_text(json.dumps(to_record(tiny.prepared(folder))))

    folder = once_per_run(tmp_path_factory, "prepared", prepare)
    return from_record(PreparedData, json.loads((folder / "record.json").read_text()))


@pytest.fixture(scope="session")
def uninterrupted_weights(tmp_path_factory: pytest.TempPathFactory, prepared_data: PreparedData) -> str:
    """The digest of the model that two processes train from that data."""
    from tests.support import tiny

    def train(folder: Path) -> None:
        tiny.on_ranks(tiny.train_request(folder, prepared_data, str(folder / "train")))

    return tiny.weights(str(once_per_run(tmp_path_factory, "uninterrupted", train) / "train"))
