"""A small model to publish."""

from __future__ import annotations

import os
from pathlib import Path

from trainer_lib.hub.base import Content, Published, Source
from trainer_lib.hub.folder import open_hub
from trainer_lib.storage import Store


def digits_content(folder: Path, weights: bytes = b"weights", readme: bytes = b"# Digits\n") -> Content:
    """Weights, a model card and the identity of a run, new at each call."""
    store = Store.open(folder)
    entry = store.write_bytes("model/model.safetensors", weights)
    return Content({"model.safetensors": Source(store, entry)}, {"README.md": readme}, {"run": os.urandom(4).hex()})


def publish(
    to: str, content: Content, *, message: str, revision: str | None = None, private: bool | None = None
) -> Published:
    """Make `content` the newest revision at an address, as the stage does."""
    return open_hub(to, revision=revision, private=private).publish(content, message=message)
