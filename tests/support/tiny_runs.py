"""Fixtures around `tests.support.tiny`: its data, prepared once, and the weights of a run that was not disturbed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trainer_lib.requests import PreparedData

# Imported inside the fixtures: fsspec reads the environment at import, after tests/conftest.py has set the sandbox up.


@pytest.fixture(scope="session")
def prepared_data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """The recipe's data, as requests describe it."""
    from tests.support import tiny

    return tiny.prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def uninterrupted_weights(tmp_path_factory: pytest.TempPathFactory, prepared_data: PreparedData) -> str:
    """The digest of the model that two processes train from that data."""
    from tests.support import tiny

    folder = tmp_path_factory.mktemp("whole")
    tiny.run(tiny.train_request(folder, prepared_data, str(folder / "train")), processes=2)
    return tiny.weights(str(folder / "train"))
