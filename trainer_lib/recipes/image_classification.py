"""The recipe image-classification: images to one of several classes.

    name: flowers
    recipe: image-classification
    prepare:
      sources: [flowers/]  # flowers/rose/1.jpg: the folder is the class; or tables with `image: COLUMN`
      options: {size: 64}
    train:
      model: {augment: {flip: true, shift: 0.1}}
      args: {num_train_epochs: 20, learning_rate: 1.0e-3, global_batch_size: 32}
    evaluate: {splits: [validation, test]}

The model is a small convolutional network, or one of transformers: `pretrained: NAME` or `folder: PATH` in both
sections, or `train.model: {config: {model_type: vit, …}}` for weights at random.

To replace a function, import the others into a file of your own, and define yours behind them::

    from trainer_lib.recipes.image_classification import *
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.errors import ConfigError
from trainer_lib.outputs import EvalPrediction
from trainer_lib.recipes.held_out_metrics import measure_classes
from trainer_lib.recipes.image_files import (
    ADDRESS,
    FITS,
    IMAGE,
    LABEL,
    MODES,
    SPLIT,
    ImageForm,
    ImageReader,
    count_pixels,
    find_images,
    mean_and_spread,
    read_image_table,
)
from trainer_lib.recipes.image_models import find_image_settings, load_image_model, new_image_model
from trainer_lib.recipes.image_net import augment_training, build_image_net
from trainer_lib.recipes.model_places import one_of
from trainer_lib.recipes.named_classes import name_classes
from trainer_lib.recipes.option_names import choose, require_choice
from trainer_lib.recipes.table_files import Table, id_of
from trainer_lib.recipes.table_form import note_form
from trainer_lib.recipes.tabular_rows import DEFAULTS, FIELD, TabularRows

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

SIZE = 64
"""Height and width where neither an option nor a model says another."""
MODEL: dict[str, Any] = {
    "pretrained": None,
    "folder": None,
    "config": {},
    "new_head": False,
    "channels": [32, 64, 128],
    "dropout": 0.1,
    "augment": {},
}
"""The settings of `build_model` (`train.model`), with their defaults."""
_USUAL_SPLITS = {"train", "training", "validation", "valid", "val", "test"}


class Options(TypedDict):
    """The options of `prepare`; `rename`, `id`, `split` and `absent_classes` are as of a table."""

    image: NotRequired[str]
    """Column of a table that has the paths; unset: the sources are folders of images."""
    label: NotRequired[str]
    """Column of a table that has the classes."""
    files: NotRequired[dict[str, Path]]
    """Split -> its folder, or its table."""
    pretrained: NotRequired[str]
    """Name of the model on the Hub whose size, mean and spread are used."""
    folder: NotRequired[Path]
    """Folder of that model."""
    size: NotRequired[int | list[int]]
    """Pixels of a side, or height and width."""
    fit: NotRequired[str]
    """How an image of another shape is fitted: stretch, crop or pad."""
    colours: NotRequired[str]
    """rgb or grey."""


class ModelOptions(TypedDict):
    """The settings of `build_model`."""

    pretrained: NotRequired[str]
    folder: NotRequired[Path]
    config: NotRequired[dict[str, Any]]
    new_head: NotRequired[bool]
    channels: NotRequired[list[int]]
    """Channels of each block of the recipe's own network."""
    dropout: NotRequired[float]
    augment: NotRequired[dict[str, Any]]
    """Random changes of training images: flip, shift, rotate, zoom."""


class ImageRows(TabularRows):
    """The images by split: their paths and labels, as a table."""

    defaults: Mapping[str, Any] = {
        **{name: DEFAULTS[name] for name in ("rename", "id", "files", "split", "absent_classes")},
        "image": None,
        "label": LABEL,
        "pretrained": None,
        "folder": None,
        "size": None,
        "fit": "stretch",
        "colours": "rgb",
    }

    @override
    def _read(self, addresses: Sequence[str], *, rename: Mapping[str, str], field: str) -> Table:
        column = self.options["image"]
        if column is not None:
            readers = {self.options["id"]: id_of}
            return read_image_table(addresses, column, rename=rename, field=field, readers=readers)
        table = find_images(addresses, field=field)
        above = {str(name).lower() for name in table.columns[SPLIT]}
        if above <= _USUAL_SPLITS and self.options["split"].get("by") != "column" and not self.options["files"]:
            names = ", ".join(sorted(above))
            what = f"The folders above those of the classes are called {names}: they are splits, and would be mixed."
            remedy = "Set prepare.options.split={by: column, column: split}."
            raise ConfigError(what, field=f"{FIELD}.split", value=self.options["split"], remedy=remedy)
        return table

    @override
    def _features(self) -> list[str]:
        return []

    def images(self, form: ImageForm, counts: dict[str, Any]) -> dict[str, Iterator[dict[str, Any]]]:
        """For every split its rows: `image` (the path), `pixels`, `labels` and `row_id`.

        Args:
            form: what images are brought into.
            counts: what becomes the statistics of the training images while these are read.
        """
        labels = self.class_numbers(self.classes())
        ids, reader = self._ids(), ImageReader(form, "the folder of the table")
        paths, addresses = self.table.texts(self.options["image"] or IMAGE), self.table.columns[ADDRESS]

        def read(split: str, chosen: Sequence[int]) -> Iterator[dict[str, Any]]:
            for row in chosen:
                place = self.table.places[row] if self.options["image"] else ""
                pixels = reader.read(addresses[row], place)
                if split == "train":
                    count_pixels(counts, pixels)
                yield {"row_id": ids[row], "image": paths[row], "pixels": pixels, "labels": labels[row]}

        return {split: read(split, chosen.tolist()) for split, chosen in self.splits.items()}


def prepare(options: Options, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Find the images, and read those of each split.

    Returns:
        For every split its rows: `image` (the path), `pixels` uint8 ``[height, width, channels]``, `labels` (0 on) and
        `row_id`.
    """
    table = ImageRows(options, out, classes=True)
    chosen = table.options
    require_choice(chosen["fit"], FITS, field=f"{FIELD}.fit")
    require_choice(chosen["colours"], MODES, field=f"{FIELD}.colours")
    place = one_of(chosen, field=FIELD)
    size, normal = (None, None) if place is None else find_image_settings(place, field=FIELD)
    form = {"size": _size(chosen["size"], size), "colours": chosen["colours"], "fit": chosen["fit"]}
    counts: dict[str, Any] = {}
    # The images are counted as the rows are read.
    out.info.update(label=table.label, classes=table.classes(), form=form, normal=normal, counts=counts)
    names = {IMAGE: IMAGE, **({chosen["image"]: IMAGE} if chosen["image"] else {})}
    rename = {**chosen["rename"], **names}
    out.info.update(note_form({}, {"rename": rename}, optional=[IMAGE, "pixels"]))
    return table.images(ImageForm(**form), counts)


def _size(given: Any, of_model: list[int] | None) -> list[int]:
    """Height and width. Raises ConfigError for what is neither a number of pixels nor two."""
    if given is None:
        return of_model or [SIZE, SIZE]
    sides = given if isinstance(given, list) else [given, given]
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
        remedy = "Give pixels of a side, or [height, width]."
        raise ConfigError("This is not a size.", field=f"{FIELD}.size", value=given, remedy=remedy)
    return sides


def build_model(options: ModelOptions, data: DataInfo) -> nn.Module:
    """Build the small network, or a model of transformers by name, from a folder, or at random from `config`.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    chosen, classes = choose(options, MODEL, field="train.model"), data.info["classes"]
    form = ImageForm(**data.info["form"])
    place = one_of(chosen, field="train.model")
    if place is not None:
        model = load_image_model(place, classes, new_head=chosen["new_head"])
    elif chosen["config"]:
        model = new_image_model(chosen["config"], classes, size=data.info["form"]["size"], channels=form.channels)
    else:
        net = {name: chosen[name] for name in ("channels", "dropout")}
        model = build_image_net(form.channels, len(classes), **net)
    return augment_training(model, chosen["augment"], field="train.model.augment")


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch: standardized `pixel_values` ``[batch, channels, height, width]``, and labels ``[batch]``.

    New rows have the path or the URL of an image instead of its pixels; relative ones start from the working directory.
    """
    reader = data.once("reader", lambda: ImageReader(ImageForm(**data.info["form"]), str(Path.cwd()), field=IMAGE))
    pixels = np.stack([row["pixels"] if "pixels" in row else reader.read(row["image"]) for row in rows])
    means, spreads = data.info["normal"] or mean_and_spread(data.info["counts"])
    values = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32) / 255
    batch = {"pixel_values": (values - torch.tensor(means).view(1, -1, 1, 1)) / torch.tensor(spreads).view(1, -1, 1, 1)}
    if "labels" in rows[0]:
        batch["labels"] = torch.tensor([row["labels"] for row in rows])
    return batch


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure logits ``[rows, classes]``, beside the most frequent class of the same rows."""
    return measure_classes(evaluation.predictions, evaluation.label_ids, evaluation.whole_labels)


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn logits ``[rows, classes]`` into the name of the best class and the probability of each."""
    return name_classes(predictions, data.info["classes"])
