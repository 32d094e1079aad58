"""Keras models and data for tests. Import it inside tests that are marked `needs("keras")` only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainer_lib import TFTrainer, TFTrainingArguments, set_seed

FEATURES, CLASSES = 5, 3
PLAIN: dict[str, Any] = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.0}
"""Arguments with which a training does what Keras' own `fit` does."""


def keras() -> Any:
    """The package, on torch."""
    from trainer_lib.keras_models.keras_backend import import_keras

    return import_keras()


def keras_model() -> Any:
    return keras().Model


def arrays(count: int, seed: int = 0) -> tuple[Any, Any]:
    """Features ``[count, 5]`` and classes ``[count]`` of a learnable problem."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, FEATURES)).astype("float32")
    return x, (x @ draw.normal(size=(FEATURES, CLASSES))).argmax(1).astype("int64")


def pairs(count: int, seed: int = 0) -> list[Any]:
    """Samples (features, label)."""
    x, y = arrays(count, seed)
    return [(row, int(label)) for row, label in zip(x, y, strict=True)]


def classifier(dropout: float = 0.0, *, norm: bool = False, seed: int = 1) -> Any:
    """A Sequential model that is compiled with its loss; always the same weights."""
    layers = keras().layers
    set_seed(seed)  # after the import, which draws random numbers
    stack = [layers.Input((FEATURES,)), layers.Dense(8, activation="relu")]
    stack += [layers.BatchNormalization()] if norm else []
    # With a seed of its own a layer counts its draws; without one it draws from torch's generator.
    stack += [layers.Dropout(dropout, seed=3), layers.Dropout(dropout)] if dropout else []
    model = keras().Sequential([*stack, layers.Dense(CLASSES)])
    model.compile(loss=keras().losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def built(model: Any, features: Any) -> Any:
    """The model, after one call with a batch of features."""
    model(features)
    return model


def decay(steps: int) -> Any:
    """A schedule of Keras that falls from 0.01 to 0 in so many steps."""
    return keras().optimizers.schedules.PolynomialDecay(1e-2, steps, 0.0)


def fit(model: Any, optimizer: Any, count: int, epochs: int, batch: int) -> list[float]:
    """The loss of every batch of Keras' own training."""
    model.compile(optimizer=optimizer, loss=model.loss)
    seen: list[float] = []
    compute = model.compute_loss

    def noted(*args: Any, **given: Any) -> Any:
        loss = compute(*args, **given)
        seen.append(float(loss.detach()))
        return loss

    model.compute_loss = noted
    x, y = arrays(count)
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return seen[-epochs * count // batch :]  # fit() calls it once more, to build the metrics


def arguments(folder: Path | str, **given: Any) -> TFTrainingArguments:
    settings: dict[str, Any] = {"use_cpu": True, "per_device_train_batch_size": 4, "num_train_epochs": 2}
    settings |= {"learning_rate": 1e-2, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return TFTrainingArguments(str(folder), **{**settings, **given})


def trainer(folder: Path | str, data: Any, *, model: Any = None, cls: Any = TFTrainer, **given: Any) -> Any:
    """A TFTrainer around `classifier` (or `model`)."""
    names = {"eval_dataset", "callbacks", "compute_metrics", "optimizers", "data_collator", "compute_loss_func"}
    names |= {"model_init", "tb_writer", "optimizer_cls_and_kwargs"}
    own = {name: given.pop(name) for name in names if name in given}
    if model is None and "model_init" not in own:
        model = classifier()
    return cls(model, arguments(folder, **given), data, **own)


def trained(folder: Path | str, data: Any, **given: Any) -> Any:
    one = trainer(folder, data, **given)
    one.train()
    return one


def weights(one: Any) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in one.model.state_dict().items()}
