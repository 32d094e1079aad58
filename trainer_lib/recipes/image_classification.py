"""The recipe image-classification: images to classes or to a number.

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
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.data.rows.row_sources import format_of
from trainer_lib.errors import ConfigError
from trainer_lib.recipes.shared import model_places, targets
from trainer_lib.recipes.shared.recipe_options import LABEL, ROWS, PathOptions, choose, require_choice
from trainer_lib.recipes.shared.targets import compute_metrics, prediction_columns
from trainer_lib.recipes.tables import image_files
from trainer_lib.recipes.tables.cells import id_of
from trainer_lib.recipes.tables.rows import FIELD, TabularRows
from trainer_lib.recipes.tables.table_files import Table, note_form

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

__all__ = ["build_model", "collate", "compute_metrics", "prediction_columns", "prepare"]

TIMM = "timm_wrapper"
"""The type that transformers gives to the models of timm."""
ImageSettings = tuple[list[int] | None, tuple[list[float], list[float]] | None]
"""Height and width, and mean and spread of the channels; None for what a model does not say."""


def find_image_settings(place: str, *, field: str) -> ImageSettings:
    """The settings of a model's preprocessor; a model of timm has them in its `config.json`.

    Raises:
        ConfigError: there is no preprocessor. MissingExtraError: transformers is not installed.
    """
    try:
        # The settings alone: a preprocessor may need packages that reading them does not.
        processor = model_places.import_transformers().image_processing_utils.BaseImageProcessor
        settings, _ = processor.get_image_processor_dict(place)
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # also of a torchvision for another torch
        config = _read_config(place)
        given = config.get("pretrained_cfg")
        if not _is_of_timm(config) or not isinstance(given, Mapping):
            raise model_places.no_model(place, error, field=field) from error
        size = dict(zip(("height", "width"), (given.get("input_size") or ())[1:], strict=False))
        settings = {"size": size, "image_mean": given.get("mean"), "image_std": given.get("std")}
    sides = settings.get("crop_size") or settings.get("size") or {}
    if isinstance(sides, int):
        sides = {"height": sides, "width": sides}
    edge = sides.get("shortest_edge")
    pixels = [int(side) for side in (sides.get("height", edge), sides.get("width", edge)) if side is not None]
    mean, spread = ([float(value) for value in settings.get(name) or ()] for name in ("image_mean", "image_std"))
    return pixels if len(pixels) == 2 else None, (mean, spread) if mean and spread else None


def _read_config(place: str) -> Mapping[str, Any]:
    """A model's `config.json`; empty where there is none."""
    try:
        settings, _ = model_places.import_transformers().PreTrainedConfig.get_config_dict(place)
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, Mapping) else {}


def _is_of_timm(settings: Mapping[str, Any]) -> bool:
    return settings.get("model_type") == TIMM or ("architecture" in settings and "pretrained_cfg" in settings)


def new_image_model(
    config: Mapping[str, Any], head: Mapping[str, Any], *, size: Sequence[int], channels: int
) -> nn.Module:
    """A model at random, by a configuration with its `model_type`."""
    if "model_type" not in config:
        remedy = "Name one: train.model.config.model_type=vit."
        raise ConfigError("A configuration needs the type of the model.", field="train.model.config", remedy=remedy)
    image = size[0] if size[0] == size[1] else list(size)
    given = {"image_size": image, "num_channels": channels, **config, **head}
    if config["model_type"] == TIMM:
        given["model_args"] = {"in_chans": channels, **config.get("model_args", {})}
    settings = model_places.new_config(given, config, field="train.model.config")
    try:
        model: nn.Module = model_places.import_transformers().AutoModelForImageClassification.from_config(settings)
    except (ImportError, RuntimeError, ValueError) as error:
        raise model_places.no_model(str(config["model_type"]), error, field="train.model.config") from error
    return model


def load_image_model(place: str, head: Mapping[str, Any], *, new_head: bool) -> nn.Module:
    """A model by its name or from its folder, with outputs as `head_settings` gives them.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    of_timm = _is_of_timm(_read_config(place))
    classes = list(head["id2label"].values())
    model_places.require_head(place, "ForImageClassification", len(classes), is_new=new_head, has_head=of_timm)
    # timm's configuration has a number of classes of its own, which outweighs their names.
    settings = {**head, **({"num_labels": len(classes)} if of_timm else {}), "ignore_mismatched_sizes": new_head}
    kind = "AutoModelForImageClassification"
    model: nn.Module = model_places.from_place(kind, place, field="train.model", **settings)
    if of_timm:
        model.config.label_names = classes  # type: ignore[union-attr]  # saved in place of id2label
    return model


AUGMENT: dict[str, Any] = {"flip": False, "shift": 0.0, "rotate": 0.0, "zoom": 0.0}
"""Every random change, with its default: none."""
_GROUP = 8  # channels that are normalized together
_MOST_DEGREES = 180.0


class ImageNet(nn.Module):
    """Blocks of two convolutions, at half the resolution of the block before, and the mean over all places.

    Args:
        inputs: channels of an image.
        classes: size of the output.
        channels: channels of the blocks, multiples of 8.
        dropout: probability, before the output.
    """

    def __init__(self, inputs: int, classes: int, channels: Sequence[int], dropout: float) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for width in channels:
            for _ in range(2):
                # Groups, and not the batch: a row's output depends on no other row.
                blocks += [nn.Conv2d(inputs, width, 3, padding=1), nn.GroupNorm(width // _GROUP, width), nn.GELU()]
                inputs = width
            blocks.append(nn.MaxPool2d(2, ceil_mode=True))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(inputs, classes))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits ``[batch, classes]`` of images ``[batch, channels, height, width]``; with labels the cross-entropy."""
        logits = self.head(self.blocks(pixel_values).mean(dim=(2, 3)))
        if labels is None or labels.is_floating_point():  # of those `use_loss` gives the loss
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def augment_training(model: nn.Module, settings: Mapping[str, Any], *, field: str) -> nn.Module:
    """Let a model change its images at random while it is in training mode, and never else.

    The numbers are drawn as those of dropout are: a continued training draws the same ones.

    Args:
        model: takes `pixel_values` ``[batch, channels, height, width]`` by name.
        settings: some of `AUGMENT`: `flip` left and right; the most by which an image is moved (`shift`) and enlarged
            or made smaller (`zoom`), as shares of its size; the most by which it is turned, in degrees (`rotate`).

    Raises ConfigError for a setting that is unknown or out of its range; `field` has them.
    """
    chosen = choose(settings, AUGMENT, field=field)
    for name, most in (("shift", 1.0), ("zoom", 1.0), ("rotate", _MOST_DEGREES)):
        if not 0 <= chosen[name] < most + (name == "rotate"):
            remedy = f"Give a number from 0 on and below {most:g}."
            raise ConfigError("This is out of range.", field=f"{field}.{name}", value=chosen[name], remedy=remedy)

    def change(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if model.training and "pixel_values" in named:
            return args, {**named, "pixel_values": _augment(named["pixel_values"], **chosen)}
        return None

    if any(chosen.values()):
        model.register_forward_pre_hook(change, with_kwargs=True)
    return model


def _augment(images: Tensor, *, flip: bool, shift: float, rotate: float, zoom: float) -> Tensor:
    """Images ``[batch, channels, height, width]``, changed by one affine map; edges are continued."""
    # Five numbers for an image whatever is switched on: one setting does not change the draws of another.
    draws = torch.rand(len(images), 5, device=images.device) * 2 - 1
    turn = draws[:, 0] * torch.pi * rotate / 180
    scale = 1 / (1 + draws[:, 1] * zoom)
    side = torch.where(draws[:, 2] < 0, -1.0, 1.0) if flip else torch.ones_like(turn)
    shape = images.shape[2] / images.shape[3]
    cosine, sine = torch.cos(turn) * scale, torch.sin(turn) * scale
    first = torch.stack((cosine * side, -sine * shape, draws[:, 3] * shift * 2), dim=1)
    second = torch.stack((sine * side / shape, cosine, draws[:, 4] * shift * 2), dim=1)
    grid = nn.functional.affine_grid(torch.stack((first, second), dim=1), list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid.to(images.dtype), padding_mode="border", align_corners=False)


# -- the recipe -------------------------------------------------------------------------------------------------------
MODEL: dict[str, Any] = {
    "pretrained": None,  # name of a model of transformers on the Hub
    "folder": None,  # or its folder
    "config": {},  # or the configuration of one with weights at random
    "new_head": False,  # replace a head that was trained for other classes
    "channels": [32, 64, 128],  # of the blocks of the recipe's own network
    "dropout": 0.1,
    "augment": {},  # random changes of training images: flip, shift, rotate, zoom
}
"""The settings of `build_model` (`train.model`), with their defaults."""
_DARK = 2  # bits above the values of all images
SIZE = 64
"""Height and width where neither an option nor a model says another."""


class ImageRows(TabularRows):
    """The images by split: their paths and labels, as a table."""

    defaults: Mapping[str, Any] = {
        **LABEL,
        **ROWS,
        "label": image_files.FOLDER_LABEL,  # column of a table that has the classes
        "image": None,  # column of a table that has the paths; None: the sources are folders of images
        "pretrained": None,  # name of the model on the Hub whose size, mean and spread are used
        "folder": None,  # or its folder
        "size": None,  # pixels of a side, or height and width
        "fit": "stretch",  # of an image of another shape; or crop, or pad
        "colours": "rgb",  # or grey
        "bits": image_files.DEEP,  # of the values in greys of more than 8 bits: the upper 8 are kept
    }

    @override
    def _read(self, addresses: Sequence[str], *, field: str) -> Table:
        column = self.options["image"]
        if column is not None:
            form = {"readers": {**self._readers(), self.options["id"]: id_of}, "marks": self.marks}
            form |= {name: self.options[name] for name in ("rename", "read")}
            return image_files.read_image_table(addresses, column, field=field, **form)
        table = image_files.find_images(addresses, field=field)
        way, by_names = self.options["split"], "prepare.options.split={by: column, column: split}"
        above = by_names.replace("split}", "label}") + ", and prepare.options.label=split"
        for column, remedy in ((image_files.SPLIT, by_names), (image_files.FOLDER_LABEL, above)):
            names = {str(name) for name in table.columns[column] if str(name).lower() in image_files.USUAL_SPLITS}
            if len(names) > 1 and way.get("by") != "column" and not self.options["files"]:
                what = f"Folders of the images are called {', '.join(sorted(names))}"
                what += ": they are splits, and would be mixed."
                raise ConfigError(what, field=f"{FIELD}.split", value=way, remedy=f"Set {remedy}.")
        if self.options["label"] == image_files.FOLDER_LABEL and way.get("column") != image_files.SPLIT:
            deep = next((row for row, path in enumerate(table.columns[image_files.IMAGE]) if path.count("/") > 1), None)
            if deep is not None:
                own, upper = (table.columns[column][deep] for column in (image_files.FOLDER_LABEL, image_files.SPLIT))
                what = f"The class of an image is its own folder, such as '{own}'"
                self._warnings.append(f"{what}; prepare.options.label=split takes the one above, such as '{upper}'.")
        return table

    @override
    def _features(self) -> list[str]:
        return []

    def images(
        self, labels: Sequence[Any], form: image_files.ImageForm, counts: dict[str, Any]
    ) -> dict[str, Iterator[dict[str, Any]]]:
        """For every split its rows: `image` (the path), `pixels`, `labels` and `row_id`.

        `counts` becomes the statistics of the training images while these are read.
        """
        ids, addresses = self._ids(), self.table.columns[image_files.ADDRESS]
        paths = self.table.texts(self.options["image"] or image_files.IMAGE)
        first: dict[bytes, tuple[str, int]] = {}

        def read(split: str, chosen: Sequence[int]) -> Iterator[dict[str, Any]]:
            repeats: dict[str, list[str]] = {}
            for row in chosen:
                place = self.table.places[row] if self.options["image"] else ""
                pixels = form.read(addresses[row], "the folder of the table", place)
                if split == "train":
                    image_files.count_pixels(counts, pixels)
                before, other = first.setdefault(hashlib.sha256(pixels.tobytes()).digest(), (split, row))
                pair = f"{paths[row]} is {paths[other]}"
                if before != split:
                    repeats.setdefault(f"are in '{before}' as well, which makes measures too good", []).append(pair)
                if not np.array_equal(labels[row], labels[other]):
                    repeats.setdefault("are there with another label as well", []).append(pair)
                yield {"row_id": ids[row], "image": paths[row], "pixels": pixels, "labels": labels[row]}
            for what, those in repeats.items():
                self._warnings.append(f"Images of '{split}' {what}: {len(those):,}, such as {those[0]}.")
            if split == "train" and 0 < form.deepest <= form.bits - _DARK:
                what = f"Images of {form.bits} bits use {form.deepest} of them, and the upper 8 are kept"
                self._warnings.append(f"{what}: prepare.options.bits={max(form.deepest, 8)} keeps more.")

        return {split: read(split, chosen.tolist()) for split, chosen in self.splits.items()}


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Find the images, and read those of the splits.

    Returns:
        For every split its rows: `image` (the path), `pixels` uint8 ``[height, width, channels]``, `labels` (of a class
        0 on) and `row_id`.
    """
    table = ImageRows(options, out)
    chosen = table.options
    require_choice(chosen["fit"], image_files.FITS, field=f"{FIELD}.fit")
    require_choice(chosen["colours"], image_files.MODES, field=f"{FIELD}.colours")
    place = model_places.one_of(chosen, field=FIELD)
    size, normal = (None, None) if place is None else find_image_settings(place, field=FIELD)
    if not 8 <= (bits := chosen["bits"]) <= image_files.DEEP:
        raise ConfigError("This is not a number of bits.", field=image_files.BITS, value=bits, remedy="Give 8 to 16.")
    form = {"size": _size(chosen["size"], size), **{name: chosen[name] for name in ("colours", "fit", "bits")}}
    if chosen["image"] and all(map(format_of, out.sources)):
        out.warnings.append("No folder with images is in prepare.sources, so that changed images are not noticed.")
    counts: dict[str, Any] = {}
    # The images are counted as the rows are read.
    labels = targets.label_rows(table, out.info)
    out.info.update(label=table.label, form=form, normal=normal, counts=counts)
    names = {image_files.IMAGE: image_files.IMAGE, **({chosen["image"]: image_files.IMAGE} if chosen["image"] else {})}
    rename = {**chosen["rename"], **names}
    out.info.update(note_form({}, {"rename": rename, "read": chosen["read"]}, optional=[image_files.IMAGE, "pixels"]))
    return table.images(labels, image_files.ImageForm(**form), counts)


def _size(given: Any, of_model: list[int] | None) -> list[int]:
    """Height and width. Raises ConfigError for what is neither a number of pixels nor two."""
    if given is None:
        return of_model or [SIZE, SIZE]
    sides = given if isinstance(given, list) else [given, given]
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
        remedy = "Give pixels of a side, or [height, width]."
        raise ConfigError("This is not a size.", field=f"{FIELD}.size", value=given, remedy=remedy)
    return sides


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the small network, or a model of transformers by name, from a folder, or at random from `config`.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    own, loss = targets.split_loss(options)
    chosen, head = choose(own, MODEL, field="train.model"), targets.head_settings(data.info)
    form = image_files.ImageForm(**data.info["form"])
    place = model_places.one_of(chosen, field="train.model")
    if place is not None:
        model = load_image_model(place, head, new_head=chosen["new_head"])
    elif chosen["config"]:
        model = new_image_model(chosen["config"], head, size=data.info["form"]["size"], channels=form.channels)
    else:
        channels = chosen["channels"]
        if not channels or any(type(width) is not int or width < _GROUP or width % _GROUP for width in channels):
            what = f"The channels of each block must be a multiple of {_GROUP}."
            raise ConfigError(what, field="train.model.channels", value=channels, remedy="Give such as [32, 64].")
        model = ImageNet(form.channels, len(targets.head_names(data.info)), channels, chosen["dropout"])
    model = augment_training(model, chosen["augment"], field="train.model.augment")
    return targets.use_loss(model, loss, data.info)


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch: standardized `pixel_values` ``[batch, channels, height, width]``, and labels.

    New rows have the path or the URL of an image instead of its pixels; relative ones start from the working directory.
    """
    form = data.once("form", lambda: image_files.ImageForm(**data.info["form"], field=image_files.IMAGE))
    pixels = np.stack([row["pixels"] if "pixels" in row else form.read(row["image"], str(Path.cwd())) for row in rows])
    means, spreads = data.info["normal"] or image_files.mean_and_spread(data.info["counts"])
    values = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32) / 255
    batch = {"pixel_values": (values - torch.tensor(means).view(1, -1, 1, 1)) / torch.tensor(spreads).view(1, -1, 1, 1)}
    return targets.with_labels(batch, rows)
