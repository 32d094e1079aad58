"""Models of transformers for images: by name, from a folder, or at random; and how their images are standardized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from trainer_lib.errors import ConfigError
from trainer_lib.recipes.tokenizing import import_transformers, no_model


def find_image_settings(place: str, *, field: str) -> tuple[list[int] | None, tuple[list[float], list[float]] | None]:
    """What a model's preprocessor says: height and width, and mean and spread of each channel; None for what it omits.

    Args:
        place: the model's name on the Hub, or its folder.
        field: the option that names it, for errors.

    Raises:
        ConfigError: there is no preprocessor. MissingExtraError: transformers is not installed.
    """
    # The settings alone: a preprocessor may need packages that reading them does not.
    library = import_transformers().image_processing_utils.BaseImageProcessor
    try:
        settings, _ = library.get_image_processor_dict(place)
    except (OSError, ValueError) as error:
        raise no_model(place, error, field=field) from error
    normal = (settings.get("image_mean"), settings.get("image_std"))
    sides = settings.get("crop_size") or settings.get("size")
    if isinstance(sides, int):
        sides = {"height": sides, "width": sides}
    sides = sides or {}
    edge = sides.get("shortest_edge")
    size = [int(each) for each in (sides.get("height", edge), sides.get("width", edge)) if each is not None]
    found = [float(each) for each in normal[0] or ()], [float(each) for each in normal[1] or ()]
    return (size if len(size) == 2 else None), (found if all(found) else None)


def new_image_model(
    config: Mapping[str, Any], classes: Sequence[str], *, size: Sequence[int], channels: int
) -> nn.Module:
    """A model at random, by a configuration with its `model_type`."""
    library = import_transformers()
    if "model_type" not in config:
        remedy = "Name one: train.model.config.model_type=vit."
        raise ConfigError("A configuration needs the type of the model.", field="train.model.config", remedy=remedy)
    image = size[0] if size[0] == size[1] else list(size)
    given = {"image_size": image, "num_channels": channels, **config, **_names(classes)}
    try:
        settings = library.AutoConfig.for_model(**given)
        model: nn.Module = library.AutoModelForImageClassification.from_config(settings)
    except ValueError as error:
        raise no_model(str(config["model_type"]), error, field="train.model.config") from error
    return model


def load_image_model(place: str, classes: Sequence[str], *, new_head: bool) -> nn.Module:
    """A model by its name or from its folder.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    library = import_transformers()
    try:
        config = library.AutoConfig.from_pretrained(place)
        has_head = any("ForImageClassification" in name for name in config.architectures or ())
        if has_head and config.num_labels != len(classes) and not new_head:
            raise ConfigError(
                f"The model's head knows {config.num_labels} classes, and the data has {len(classes)}.",
                field="train.model.new_head",
                value=False,
                remedy="Set train.model.new_head=true: the head then begins at random.",
            )
        automatic = library.AutoModelForImageClassification
        return automatic.from_pretrained(place, ignore_mismatched_sizes=new_head, **_names(classes))  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise no_model(place, error, field="train.model") from error


def _names(classes: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(classes)), "label2id": {name: index for index, name in enumerate(classes)}}
