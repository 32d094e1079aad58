"""Models of transformers for images: by name, from a folder, or at random; and how their images are standardized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from trainer_lib.errors import ConfigError, MissingExtraError, first_line
from trainer_lib.recipes.tokenizing import import_transformers, new_config, no_model

TIMM = "timm_wrapper"
"""The type that transformers gives to the models of timm."""


def find_image_settings(place: str, *, field: str) -> tuple[list[int] | None, tuple[list[float], list[float]] | None]:
    """What a model's preprocessor says: height and width, and mean and spread of each channel; None for what it omits.

    A model of timm has no preprocessor; its `config.json` says both.

    Args:
        place: the model's name on the Hub, or its folder.
        field: the option that names it, for errors.

    Raises:
        ConfigError: there is no preprocessor. MissingExtraError: transformers, or timm for its model, is not installed.
    """
    try:
        library = import_transformers().image_processing_utils
    except (ImportError, RuntimeError) as error:
        raise _no_torchvision("transformers cannot import its image processing", error, place, field) from error
    try:
        # The settings alone: a preprocessor may need packages that reading them does not.
        settings, _ = library.BaseImageProcessor.get_image_processor_dict(place)
    except (OSError, ValueError) as error:
        of_timm = _find_timm_settings(place, field)
        if of_timm is None:
            raise no_model(place, error, field=field) from error
        return of_timm
    normal = (settings.get("image_mean"), settings.get("image_std"))
    sides = settings.get("crop_size") or settings.get("size")
    if isinstance(sides, int):
        sides = {"height": sides, "width": sides}
    sides = sides or {}
    edge = sides.get("shortest_edge")
    size = [int(each) for each in (sides.get("height", edge), sides.get("width", edge)) if each is not None]
    found = [float(each) for each in normal[0] or ()], [float(each) for each in normal[1] or ()]
    return (size if len(size) == 2 else None), (found if all(found) else None)


def _find_timm_settings(
    place: str, field: str
) -> tuple[list[int] | None, tuple[list[float], list[float]] | None] | None:
    """Height and width, and mean and spread, of a model of timm; None for another model."""
    settings = _read_config(place)
    given = settings.get("pretrained_cfg")
    if not _is_of_timm(settings) or not isinstance(given, Mapping):
        return None
    import_timm(place, field=field)
    channels_first = [int(each) for each in given.get("input_size") or ()]
    found = [float(each) for each in given.get("mean") or ()], [float(each) for each in given.get("std") or ()]
    return (channels_first[1:] if len(channels_first) == 3 else None), (found if all(found) else None)


def _read_config(place: str) -> Mapping[str, Any]:
    """A model's `config.json`; empty where there is none."""
    try:
        settings, _ = import_transformers().PreTrainedConfig.get_config_dict(place)
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, Mapping) else {}


def _is_of_timm(settings: Mapping[str, Any]) -> bool:
    return settings.get("model_type") == TIMM or ("architecture" in settings and "pretrained_cfg" in settings)


def import_timm(place: str, *, field: str) -> None:
    """Import the package timm, so that a model of it is refused as early as it is named.

    Raises:
        MissingExtraError: timm is not installed. ConfigError: it cannot be imported.
    """
    try:
        import timm  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        what = f"A model of timm needs the package {error.name}."
        remedy = f"Install it: pip install {error.name}."
        raise MissingExtraError(what, field=field, value=place, remedy=remedy) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise _no_torchvision("The package timm cannot be imported", error, place, field) from error


def _no_torchvision(what: str, error: Exception, place: str, field: str) -> ConfigError:
    """The error for a torchvision that was built for another torch, which fails in its own ways."""
    remedy = "Install the torchvision that was built for this torch (pytorch.org/get-started), or remove it."
    return ConfigError(f"{what}: {first_line(error).rstrip('.')}.", field=field, value=place, remedy=remedy)


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
    if config["model_type"] == TIMM:
        import_timm(str(config.get("architecture", TIMM)), field="train.model.config")
        given["model_args"] = {"in_chans": channels, **config.get("model_args", {})}
    try:
        settings = new_config(given, config, field="train.model.config")
        model: nn.Module = library.AutoModelForImageClassification.from_config(settings)
    except ConfigError:
        raise
    except ValueError as error:
        raise no_model(str(config["model_type"]), error, field="train.model.config") from error
    return model


def load_image_model(place: str, classes: Sequence[str], *, new_head: bool) -> nn.Module:
    """A model by its name or from its folder.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    library = import_transformers()
    of_timm = _is_of_timm(_read_config(place))
    if of_timm:
        import_timm(place, field="train.model")
    try:
        config = library.AutoConfig.from_pretrained(place)
        has_head = any("ForImageClassification" in name for name in config.architectures or ()) or of_timm
        if has_head and config.num_labels != len(classes) and not new_head:
            raise ConfigError(
                f"The model's head knows {config.num_labels} classes, and the data has {len(classes)}.",
                field="train.model.new_head",
                value=False,
                remedy="Set train.model.new_head=true: the head then begins at random.",
            )
        automatic = library.AutoModelForImageClassification
        # timm's configuration has a number of classes of its own, which outweighs their names.
        names = {**_names(classes), **({"num_labels": len(classes)} if of_timm else {})}
        model: nn.Module = automatic.from_pretrained(place, ignore_mismatched_sizes=new_head, **names)
        if of_timm:
            model.config.label_names = list(classes)  # type: ignore[union-attr]  # saved in place of id2label
        return model
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise no_model(place, error, field="train.model") from error


def _names(classes: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(classes)), "label2id": {name: index for index, name in enumerate(classes)}}
