"""Models of timm in the recipe image-classification: what their configuration says, and refusals without timm."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.recipes.image_models import find_image_settings, load_image_model, new_image_model

# As the repositories of timm on the Hub have it, with what is not read left out.
CONFIG: dict[str, Any] = {
    "architecture": "resnet10t",
    "num_classes": 1000,
    "num_features": 512,
    "pretrained_cfg": {
        "tag": "c3_in1k",
        "input_size": [3, 176, 224],
        "interpolation": "bicubic",
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "num_classes": 1000,
        "classifier": "fc",
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model of timm without its weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the name, which is imported and never called."""
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("saved", [False, True])
def test_size_and_spread_come_from_the_configuration(folder: str, saved: bool) -> None:
    if saved:  # by transformers, which adds the type and takes the classes out
        given = {**CONFIG, "model_type": "timm_wrapper", "label_names": ["a", "b"]}
        Path(folder, "config.json").write_text(json.dumps(given))
    size, normal = find_image_settings(folder, field="prepare.options")
    assert size == [176, 224]
    assert normal == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.mark.usefixtures("installed")
def test_what_the_configuration_omits_is_left_to_the_recipe(folder: str) -> None:
    Path(folder, "config.json").write_text(json.dumps({**CONFIG, "pretrained_cfg": {"input_size": [224]}}))
    assert find_image_settings(folder, field="prepare.options") == (None, None)


@pytest.mark.parametrize(
    "use",
    [
        lambda place: find_image_settings(place, field="train.model"),
        lambda place: load_image_model(place, ["a", "b"], new_head=True),
        lambda place: new_image_model(
            {"model_type": "timm_wrapper", "architecture": place}, ["a"], size=[8, 8], channels=1
        ),
    ],
)
def test_a_model_of_timm_is_refused_where_timm_is_not_installed(
    folder: str, use: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match="needs the package timm") as caught:
        use(folder)
    assert (caught.value.field or "").startswith("train.model")
    assert caught.value.value == folder
    assert caught.value.remedy == "Install it: pip install timm."


def test_a_torchvision_of_another_torch_is_named(folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    failing = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
    (tmp_path / "packages" / "timm.py").write_text(failing)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ConfigError, match="torchvision::nms does not exist") as caught:
        find_image_settings(folder, field="prepare.options")
    assert "torchvision" in (caught.value.remedy or "")


def test_a_folder_without_a_preprocessor_that_is_not_of_timm_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="transformers cannot load this model"):
        find_image_settings(str(tmp_path), field="prepare.options")
