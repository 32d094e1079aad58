"""Writes scikit-learn's 1,797 scans of digits as PNG files, a folder for each class: python write_digits.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn import datasets


def write_digits(folder: Path) -> None:
    """Write `<folder>/<class>/<number>.png`, 8 x 8 pixels each, in grey."""
    data = datasets.load_digits()
    for number, (scan, target) in enumerate(zip(data.images, data.target, strict=True)):
        path = folder / str(target) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((scan * (255 / 16)).astype(np.uint8)).save(path)


if __name__ == "__main__":
    write_digits(Path(sys.argv[1]))
