"""A published model that cannot be loaded says what is wrong, and what to do; nothing of it is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.model_folders import publish_line, remove_fetched_code
from tests.support.toy import RECIPE
from trainer_lib import load_model
from trainer_lib.errors import ConfigError, StoreUnreachableError

MISSING = "import no_such_package_at_all"


@pytest.fixture(autouse=True)
def _code_is_removed() -> Iterator[None]:
    yield
    remove_fetched_code()


@pytest.mark.parametrize(
    "recipe",
    [f"{MISSING}\n{RECIPE}", RECIPE.replace("    import torch\n", f"    import torch\n    {MISSING}\n", 1)],
    ids=["of the file", "of build_model"],
)
def test_a_package_that_is_missing_is_named(tmp_path: Path, recipe: str) -> None:
    publish_line(tmp_path, recipe=recipe)
    with pytest.raises(
        ConfigError, match="needs the package no_such_package_at_all, which is not installed"
    ) as refused:
        load_model(str(tmp_path), trust_code=True)
    assert "Install it." in str(refused.value.remedy)


def test_a_registry_that_is_down_is_named_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(StoreUnreachableError) as refused:
        load_model("models:/line@champion")
    assert refused.value.message == "The registry does not answer: the connection is refused."
    assert "MLFLOW_TRACKING_URI" in str(refused.value.remedy)
