"""Keras on torch: the package's first import, and the names of a model's parameters."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer_lib.errors import ConfigError, MissingExtraError

_VARIABLE = "KERAS_BACKEND"
_NUMBERED = re.compile(r"(.+?)(?:_(\d+))?")
_PARAMETERS = "_torch_params"  # under this name, Keras registers a layer's variables with torch


def choose_torch() -> None:
    """Let Keras run on torch when it is imported, unless the environment chooses a backend."""
    if "keras" not in sys.modules:
        os.environ.setdefault(_VARIABLE, "torch")


def import_keras() -> Any:
    """The package keras, on torch.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: it runs on another backend.
    """
    choose_torch()
    try:
        keras = importlib.import_module("keras")
    except ImportError as error:
        if os.environ.get(_VARIABLE, "torch") != "torch":
            raise _wrong_backend(os.environ[_VARIABLE]) from error
        raise MissingExtraError(f"Keras cannot be imported: {error}.", field="model", extra="keras") from error
    if keras.config.backend() != "torch":
        raise _wrong_backend(keras.config.backend())
    return keras


def _wrong_backend(name: str) -> ConfigError:
    return ConfigError(
        "A TFTrainer trains Keras models that run on torch.",
        field=_VARIABLE,
        value=name,
        remedy="Set KERAS_BACKEND=torch in the environment, or import TFTrainer before keras.",
    )


def is_keras_model(model: object) -> bool:
    """Whether a model is a `keras.Model`; keras is not imported for it."""
    kind = getattr(sys.modules.get("keras"), "Model", None)
    return isinstance(kind, type) and isinstance(model, kind)


@contextmanager
def placed_on(keras: Any, device: torch.device) -> Iterator[None]:
    """Let Keras create and convert tensors on `device` inside the block."""
    # Keras chooses a GPU by itself, even where `use_cpu` is set.
    with keras.device(str(device)):
        yield


def register_parameters(model: Any) -> None:
    """Register a built model's variables with torch once each, under names that do not depend on the process.

    Keras numbers layers without a name through the whole process: a second model of the same code has ``dense_2`` where
    the first one has ``dense``, and a checkpoint of the first would not fit it. Here the numbers of every kind of layer
    start at 0, as in a new process.
    """
    names = _process_independent(model)
    tensors: dict[str, Any] = {}
    for variable in model.variables:
        name = names[variable.path]
        # Layers of one model may share a name, and so their variables; every parameter needs its own.
        same = sum(each.partition("~")[0] == name for each in tensors)
        tensors[f"{name}~{same}" if same else name] = variable.value
    for module in list(model.modules()):
        if hasattr(type(module), "torch_params"):  # a layer of Keras: without any, it would register its own again
            module._modules.pop(_PARAMETERS, None)
            module.register_module(_PARAMETERS, nn.ParameterDict(tensors if module is model else {}))


def _process_independent(model: Any) -> dict[str, str]:
    """A variable's path -> its name, with the numbers of generated names counted from 0."""
    kinds = {_snake_case(type(layer).__name__) for layer in model._flatten_layers()} | {"seed_generator"}
    paths = [str(variable.path) for variable in model.variables]
    first: dict[str, int] = {}
    for kind, number in _generated(paths, kinds):
        first[kind] = min(number, first.get(kind, number))

    def renamed(part: str) -> str:
        kind, number = _split(part)
        if kind not in first:
            return part
        shifted = number - first[kind]
        return f"{kind}_{shifted}" if shifted else kind

    return {path: "/".join(map(renamed, path.split("/"))) for path in paths}


def _generated(paths: Iterable[str], kinds: set[str]) -> Iterator[tuple[str, int]]:
    for path in paths:
        for part in path.split("/"):
            kind, number = _split(part)
            if kind in kinds:
                yield kind, number


def _split(part: str) -> tuple[str, int]:
    match = _NUMBERED.fullmatch(part)
    return (part, 0) if match is None else (match[1], int(match[2] or 0))


def _snake_case(name: str) -> str:
    # Keras' own rule for the names that it generates.
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
