"""The recipe image-classification: folders and tables of images, modes and sizes, timm, and what it refuses."""

from __future__ import annotations

import io
import json
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.support.named_recipes import Prepared, collate_of, prepare_sources, refusal, trainer_of
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.recipes import PrepareOutput, load
from trainer_lib.recipes.image_classification import (
    augment_training,
    find_image_settings,
    load_image_model,
    new_image_model,
)
from trainer_lib.recipes.shared.targets import head_settings
from trainer_lib.recipes.tables.image_files import ImageForm
from trainer_lib.storage import Store
from trainflow.flows.new_project.starting import digits

VIT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
TINY = {"model_type": "vit", **VIT}
SPLIT_LABELS = "called test, train: … column: label}, and prepare.options.label=split"


def prepared(folder: Path, sources: list[Path], /, **options: Any) -> Prepared:
    settings = {"size": 8, "colours": "grey", **options}
    return prepare_sources("image-classification", list(map(str, sources)), settings, folder)


def written(folder: Path, count: int = 150) -> Path:
    for name, content in list(digits().items())[:count]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def refused(folder: Path, sources: list[Path], **options: Any) -> TrainflowError:
    return refusal(lambda: prepared(folder, sources, **options))


def new_trainer(made: Prepared, folder: Path, steps: int, **more: Any) -> Any:
    recipe, splits, data = made
    torch.manual_seed(0)
    model = {"channels": [16, 32], "dropout": 0.0, "augment": {"shift": 0.05, "rotate": 5.0}}
    settings = {"per_device_train_batch_size": 32, "learning_rate": 5e-3, **more}
    return trainer_of(recipe, data, recipe.build_model(model, data), folder / "run", splits["train"], steps, **settings)


# -- what it makes of real images -------------------------------------------------------------------------------------
def test_a_trained_network_beats_the_most_frequent_class_and_reads_the_path_of_a_new_image(tmp_path: Path) -> None:
    folder = written(tmp_path / "digits", 400)
    made = recipe, splits, data = prepared(tmp_path, [folder], split={"test": 0.3})
    assert {row["pixels"].shape for row in splits["train"]} == {(8, 8, 1)}
    assert splits["train"][0]["image"].startswith("0/"), "no path of a machine is in the data"
    trainer = new_trainer(made, tmp_path, 40)
    trainer.train()
    assert trainer.evaluate(eval_dataset=splits["test"])["eval_accuracy_over_majority"] > 0.4
    row = splits["test"][0]
    by_path = trainer.predict([{"image": str(folder / row["image"])}]).predictions
    by_pixels = trainer.predict([{"image": "", "pixels": row["pixels"]}]).predictions
    assert np.array_equal(by_path, by_pixels)
    assert recipe.prediction_columns(by_path, data)["prediction"][0] in data.info["classes"]


def test_a_continued_training_draws_the_augmentation_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    made = prepared(tmp_path, [written(tmp_path / "digits", 150)], split={"test": 0.3})
    whole, again = (new_trainer(made, tmp_path, 6, save_strategy="steps", save_steps=3) for _ in range(2))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_images_are_changed_in_training_mode_only(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    class Look(nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            seen.append(pixel_values)
            return pixel_values

    image = torch.arange(48, dtype=torch.float32).view(1, 1, 6, 8).repeat(16, 1, 1, 1)
    model = augment_training(Look(), {"flip": True}, field="train.model.augment")
    model.train()(pixel_values=image)
    model.eval()(pixel_values=image)
    changed, same = seen
    assert torch.equal(same, image)
    flipped = torch.isclose(changed, image.flip(3), atol=1e-4).flatten(1).all(dim=1)
    kept = torch.isclose(changed, image, atol=1e-4).flatten(1).all(dim=1)
    assert (flipped ^ kept).all(), "each image is as it was, or its mirror image"
    assert flipped.any() and kept.any()
    assert augment_training(Look(), {}, field="x")._forward_pre_hooks == {}
    with pytest.raises(ConfigError, match="no such option") as caught:
        augment_training(Look(), {"flipp": True}, field="train.model.augment")
    assert caught.value.remedy == 'Did you mean "flip"?'
    with pytest.raises(ConfigError, match="out of range"):
        augment_training(Look(), {"shift": 1.5}, field="train.model.augment")


def test_pixels_are_standardized_by_the_training_images(tmp_path: Path) -> None:
    made = prepared(tmp_path, [written(tmp_path / "digits")], split={"test": 0.3})
    collate, rows = collate_of(made), made[1]["train"]
    batch = collate(rows)
    assert batch["pixel_values"].shape == (len(rows), 1, 8, 8)
    assert batch["pixel_values"].mean().item() == pytest.approx(0, abs=1e-5)
    assert batch["pixel_values"].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(batch["pixel_values"], pickle.loads(pickle.dumps(collate))(rows)["pixel_values"])


def test_a_model_of_transformers_brings_its_own_size_and_its_head_must_fit(tmp_path: Path) -> None:
    folder = written(tmp_path / "digits")
    recipe, splits, data = prepared(tmp_path, [folder], colours="rgb", split={"test": 0.3})
    model: Any = recipe.build_model({"config": TINY}, data)
    model.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8},'
        ' "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}'
    )
    options = {"colours": "rgb", "size": None, "folder": tmp_path / "vit", "split": {"test": 0.3}}
    made = _, splits, of_folder = prepared(tmp_path, [folder], **options)
    batch = collate_of(made)(splits["train"][:2])
    assert batch["pixel_values"].shape == (2, 3, 8, 8)
    assert batch["pixel_values"].min() == -1
    loaded: Any = recipe.build_model({"folder": tmp_path / "vit", "augment": {"flip": True}}, of_folder)
    assert loaded(**batch).logits.shape == (2, 10)
    of_folder.info["classes"] = of_folder.info["classes"][:3]
    for wrong, words in (
        ({"folder": tmp_path / "vit"}, "knows 10 classes, and the data has 3"),
        ({"channels": [12]}, "multiple of 8"),
        ({"config": {"hidden_size": 8}}, "needs the type"),
    ):
        with pytest.raises(ConfigError, match=words):
            recipe.build_model(wrong, of_folder)


# -- folders, tables and splits; what is refused ----------------------------------------------------------------------
def test_splits_are_given_by_folders_and_never_mixed_unsaid(tmp_path: Path) -> None:
    for split, start in (("train", 0), ("test", 100)):
        for name, content in list(digits().items())[start : start + 100]:
            (tmp_path / "photos" / split / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "photos" / split / name).write_bytes(content)
    assert "are called test, train: they are splits" in refused(tmp_path, [tmp_path / "photos"]).message
    _, splits, _ = prepared(tmp_path, [tmp_path / "photos"], split={"by": "column", "column": "split"})
    assert {name: {row["image"].split("/")[0] for row in rows} for name, rows in splits.items()} == {
        "train": {"train"},
        "test": {"test"},
    }
    files = {name: tmp_path / "photos" / name for name in ("train", "test")}
    _, by_files, _ = prepared(tmp_path, [], files=files)
    assert {name: len(rows) for name, rows in by_files.items()} == {"train": 100, "test": 100}


def test_a_table_names_images_from_its_own_folder(tmp_path: Path) -> None:
    folder = written(tmp_path / "digits", 100)
    names = sorted(path.relative_to(tmp_path) for path in folder.rglob("*.png"))
    lines = "".join(f"{name},{'even' if int(name.parts[1]) % 2 == 0 else 'odd'}\n" for name in names)
    (tmp_path / "list.csv").write_text("photo,kind\n" + lines)
    options: dict[str, Any] = {"image": "photo", "label": "kind", "split": {"test": 0.3}}
    _, splits, data = prepared(tmp_path, [tmp_path / "list.csv", folder], **options)
    assert data.info["classes"] == ["even", "odd"]
    assert data.info["label"] == "kind"
    assert sum(map(len, splits.values())) == 100
    assert {"row_id", "image", "pixels", "labels"} == set(splits["train"][0])
    assert refused(tmp_path, [tmp_path / "list.csv"], **{**options, "image": "foto"}).remedy == 'Did you mean "photo"?'
    (tmp_path / "list.csv").write_text("photo,kind\n" + lines + "digits/nowhere.png,odd\n")
    error = refused(tmp_path, [tmp_path / "list.csv"], **options)
    assert "row 100 (line 102): " in error.message and "nowhere.png: there is no such file" in error.message
    assert "no table among the sources" in refused(tmp_path, [folder], **options).message


def test_files_and_options_that_spoil_the_training_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "digits")
    (folder / "3" / "note.png").write_text("not a picture")
    assert "digits/3/note.png: the file of 13 bytes is not an image" in refused(tmp_path, [folder]).message
    whole = next((folder / "3").glob("0*.png")).read_bytes()
    (folder / "3" / "note.png").write_bytes(whole[: len(whole) // 2])
    assert "note.png: the file of" in refused(tmp_path, [folder]).message
    (folder / "3" / "note.png").unlink()
    (folder / "rare").mkdir()
    (folder / "rare" / "one.png").write_bytes(whole)
    assert "no row of the class 'rare', of which there are 1" in refused(tmp_path, [folder]).message
    (folder / "rare" / "one.png").unlink()
    for options, words in (
        ({"siez": 3}, 'Did you mean "size"?'),
        ({"size": [3]}, "not a size"),
        ({"colours": "gray"}, 'Did you mean "grey"?'),
        ({"fit": "squeeze"}, "not one of the choices"),
    ):
        assert words in str(refused(tmp_path, [folder], **options))
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path, [tmp_path / "empty"]).field == "prepare.sources"


def several(folder: Path, *names: str) -> None:
    """Eight different images in each of these folders, or one image of a name with an ending."""
    for number, name in enumerate(names):
        for place in [name] if "." in name else [f"{name}/{image}.png" for image in range(8)]:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shade = np.full((4, 4), 8 * number + int(Path(place).stem.strip("_")) if "/" in place else 99, np.uint8)
            Image.fromarray(shade).save(folder / place, "PNG")


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        ("cat dog stray.png", {}, "cat/0.png and stray.png are not equally deep … prepare.sources=[FOLDER/*/*]"),
        ("cat dog cat/more", {}, "cat/0.png and cat/more/0.png are not equally deep"),
        ("train/cat train/dog test", {}, "test/0.png and train/cat/0.png are not equally deep"),
        ("train/cat test/dog spare/dog", {}, "called test, train: they are splits … {by: column, column: split}"),
        ("cat/train cat/test dog/train", {}, SPLIT_LABELS),
        ("cat dog", {"bits": 20}, "not a number of bits … Give 8 to 16"),
        ("cat/x dog/y", {}, "own folder, such as 'x'; prepare.options.label=split takes the one above, such as 'cat'"),
        ("cat/x dog/y", {"label": "split"}, ""),
        ("train/cat train/dog", {}, ""),  # a split by itself mixes none
        ("cat dog fox/1.heic", {}, "1 file without images left out, such as fox/1.heic."),
        ("cat dog dog/_28.jfif cat/_29.JPG", {"rows": 18}, ""),  # as cameras and browsers write them
    ],
)
def test_folders_that_may_mean_something_else_are_refused_or_named(
    tmp_path: Path, names: str, options: dict[str, Any], words: str
) -> None:
    several(tmp_path / "all", *names.split())
    source, more = tmp_path / "all" / ("train" if names.endswith("train/dog") else ""), dict(options)
    out, rows = PrepareOutput(Store.open(tmp_path / "out"), [str(source)], ()), more.pop("rows", 16)
    given = {"size": 8, "split": {"test": 0.25, "validation": 0.25}, **more}
    try:
        splits = load(recipe_file("image-classification"), tmp_path).prepare(given, out)
        assert sum(len(list(part)) for part in splits.values()) == rows
    except TrainflowError as error:
        out.warnings = [str(error)]
    assert len(out.warnings) == bool(words)
    assert all(part in " ".join(out.warnings) for part in words.split(" … "))


def test_images_that_are_there_twice_are_counted_and_dark_ones_of_16_bits_named(tmp_path: Path) -> None:
    lines = []
    for number in range(16):
        Image.fromarray(np.full((2, 2), 100 * (number % 12), np.uint16)).save(tmp_path / f"{number}.png")
        lines.append(f".\\{number}.png,{'a' if number < 8 else 'b'},{'train' if number % 8 < 6 else 'test'}\n")
    (tmp_path / "list.csv").write_text("file,label,fold\n" + "".join(lines))
    out = PrepareOutput(Store.open(tmp_path / "out"), [str(tmp_path / "list.csv")], ())
    options = {"size": 2, "image": "file", "split": {"by": "column", "column": "fold"}, "colours": "grey"}
    prepare = load(recipe_file("image-classification"), tmp_path).prepare
    for rows in prepare(options, out).values():
        list(rows)
    assert [warning.partition(", such")[0] for warning in out.warnings] == [
        "No folder with images is in prepare.sources, so that changed images are not noticed.",
        "Images of 'train' are there with another label as well: 2",
        "Images of 16 bits use 11 of them, and the upper 8 are kept: prepare.options.bits=11 keeps more.",
        "Images of 'test' are in 'train' as well, which makes measures too good: 2",
        "Images of 'test' are there with another label as well: 2",
    ]
    train = prepare({**options, "bits": 11}, out)["train"]
    assert [row["pixels"][0, 0, 0] for row in train][:6] == [100 * number >> 3 for number in range(6)]
    error = refusal(lambda: [list(rows) for rows in prepare({**options, "bits": 10}, out).values()])
    assert "the value 1,100, which has more than 10 bits" in error.message and "bits=11" in str(error)


# -- modes and sizes --------------------------------------------------------------------------------------------------
def pixels(image: Image.Image, form: ImageForm, kind: str = "PNG", **saved: Any) -> np.ndarray:
    content = io.BytesIO()
    image.save(content, kind, **saved)
    return form.pixels(content.getvalue(), "here")


def test_every_mode_of_a_file_becomes_the_stated_colours() -> None:
    form, grey = ImageForm([2, 2], "rgb", "stretch"), ImageForm([2, 2], "grey", "stretch")
    assert (pixels(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), form) == 255).all(), "a transparent place is white"
    assert pixels(Image.new("LA", (2, 2), (0, 255)), form)[0, 0].tolist() == [0, 0, 0]
    palette = Image.new("RGB", (2, 2), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert pixels(palette, form)[0, 0] == pytest.approx([10, 200, 30], abs=2)
    assert pixels(Image.new("CMYK", (2, 2), (0, 255, 255, 0)), form, "TIFF")[0, 0].tolist() == [255, 0, 0]
    deep = Image.fromarray(np.full((2, 2), 0x8040, np.uint16))
    assert (pixels(deep, grey) == 0x80).all(), "the upper 8 of 16 bits"
    assert (pixels(Image.new("1", (2, 2), 1), grey) == 255).all()
    turned = Image.new("RGB", (4, 2), "black")
    turned.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    upright = pixels(turned, ImageForm([4, 2], "grey", "stretch"), exif=exif)
    assert upright[0, 1, 0] == 255 and upright.shape == (4, 2, 1)
    for wide in (np.full((2, 2), 200, np.int32), np.full((2, 2), 0.5, np.float32)):
        with pytest.raises(DataError, match=r"^prepare\.sources: here: the image has 32 bits for a pixel"):
            pixels(Image.fromarray(wide), grey, "TIFF")


def test_an_image_of_another_shape_is_stretched_cut_or_padded() -> None:
    wide = Image.new("L", (8, 4), 0)
    wide.paste(255, (2, 0, 6, 4))
    assert (pixels(wide, ImageForm([4, 4], "grey", "crop")) == 255).all()
    padded = pixels(wide, ImageForm([8, 8], "grey", "pad"))[..., 0]
    assert (padded[:2] == 0).all() and (padded[4, 3:5] == 255).all()
    stretched = pixels(wide, ImageForm([4, 4], "grey", "stretch"))
    assert stretched[0, :, 0].tolist() == pytest.approx([0, 255, 255, 0], abs=80)


# -- models of timm: what their configuration says ---------------------------------------------------------------------
# As the repositories of timm on the Hub have it, with what is not read left out.
TIMM: dict[str, Any] = {
    "architecture": "resnet10t",
    "num_classes": 1000,
    "pretrained_cfg": {
        "input_size": [3, 176, 224],
        "interpolation": "bicubic",
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "classifier": "fc",
    },
}


@pytest.fixture
def timm(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TIMM))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (TIMM, [176, 224]),
        ({**TIMM, "model_type": "timm_wrapper", "label_names": ["a", "b"]}, [176, 224]),  # as transformers saves it
        ({**TIMM, "pretrained_cfg": {"input_size": [224]}}, None),
    ],
)
def test_size_and_spread_come_from_the_configuration(timm: str, config: dict[str, Any], size: Any) -> None:
    Path(timm, "config.json").write_text(json.dumps(config))
    normal = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]) if size else None
    assert find_image_settings(timm, field="prepare.options") == (size, normal)


def test_a_folder_without_a_preprocessor_that_is_not_of_timm_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="transformers cannot load this model"):
        find_image_settings(str(tmp_path), field="prepare.options")


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_a_model_of_timm_is_refused_where_timm_is_not_installed(timm: str) -> None:
    with pytest.raises(ConfigError, match="requires the timm library"):
        load_image_model(timm, head_settings({"classes": ["a", "b"]}), new_head=True)
    with pytest.raises(ConfigError, match="requires the timm library"):
        new_image_model({"model_type": "timm_wrapper", "architecture": "resnet18"}, {}, size=[8, 8], channels=1)
