"""Images of files: the classes that they are of, and their pixels in one form, whatever mode and size a file has.

What becomes of a mode: a palette becomes its colours, CMYK and others become RGB as Pillow converts them, a transparent
place becomes white, 16 bits become the 8 upper ones. Of an animation the first picture is taken, and a photograph is
turned upright as its EXIF data says. A format of more bits than that is refused, because its range is not known.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from trainer_lib.base.paths import absolute_path, is_path
from trainer_lib.base.suggestions import counted
from trainer_lib.data.rows.row_sources import FORMATS, RowFile, find_row_files, format_of
from trainer_lib.errors import ConfigError, DataError, StorageError, first_line
from trainer_lib.recipes.tables.table_files import SOURCES, Table, Values, naming_sources, read_table
from trainer_lib.storage import Store

FITS = ("stretch", "crop", "pad")
"""Ways to fit an image of another shape: stretched, cut around its middle, or with black edges."""
MODES = {"rgb": "RGB", "grey": "L"}
"""Colours that an image may be given -> Pillow's mode."""
FOLDER_LABEL, IMAGE, SPLIT, ADDRESS = "label", "image", "split", "(address)"
"""The columns of an image folder: an image's folder, its path, the folder above, and where it is on this machine."""
USUAL_SPLITS = {"train", "training", "validation", "valid", "val", "dev", "eval", "test"}
"""Names of folders that are splits."""
DEEP = 16
"""Bits of the values in deep greys, where no option says fewer."""
BITS = "prepare.options.bits"
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


class ImageForm:
    """Reads image files into one form.

    Args:
        size: height and width in pixels.
        colours: one of `MODES`.
        fit: one of `FITS`.
        bits: of the values in greys of more than 8 bits; `deepest` are those of the greatest one so far.
        field: the setting or the column that names the files, for errors.
    """

    def __init__(self, size: Sequence[int], colours: str, fit: str, bits: int = DEEP, *, field: str = SOURCES) -> None:
        self.height, self.width = (int(side) for side in size)
        self._mode, self._fit, self.bits, self.deepest, self._field = MODES[colours], fit, bits, 0, field
        self._stores: dict[str, Store] = {}

    @property
    def channels(self) -> int:
        """Numbers of a pixel."""
        return 1 if self._mode == "L" else 3

    def read(self, address: str, start: str, place: str = "") -> np.ndarray:
        """The pixels at a path, relative to the folder `start`, or at a URL; uint8 ``[height, width, channels]``.

        Raises:
            DataError: there is no such file, or it is not an image; `place` is the row that names it.
        """
        whole = absolute_path(address.replace("\\", "/"), start) if is_path(address) else address
        folder, _, name = whole.rpartition("/")
        if folder not in self._stores:
            self._stores[folder] = Store.open(folder or "/", field=self._field)
        named = f"{place}: {whole}" if place else whole
        store = self._stores[folder]
        try:
            content = store.read_bytes(name)
        except StorageError:
            if store.exists(name):
                raise
            remedy = f"Correct the path; a relative one starts from {start}."
            raise DataError(f"{named}: there is no such file.", field=self._field, remedy=remedy) from None
        return self.pixels(content, named)

    def pixels(self, content: bytes, place: str) -> np.ndarray:
        """The pixels of an image file, uint8 ``[height, width, channels]``. Raises DataError for other bytes."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Pillow, about details of a file that it reads all the same
                with Image.open(io.BytesIO(content)) as opened:
                    image = self._in_colours(self._in_8_bits(ImageOps.exif_transpose(opened), opened.format, place))
        except DataError:
            raise
        except _UNREADABLE as error:
            unknown = isinstance(error, UnidentifiedImageError)
            why = "is not an image" if unknown else f"cannot be read as an image ({first_line(error)})"
            what = f"{place}: the file of {len(content):,} bytes {why}."
            raise DataError(what, field=self._field, remedy="Remove it, or write it again.") from error
        size = (self.width, self.height)
        if image.size != size and self._fit == "stretch":
            image = image.resize(size, Image.Resampling.BILINEAR)
        elif image.size != size:
            fitted = ImageOps.fit if self._fit == "crop" else ImageOps.pad
            image = fitted(image, size, Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8).reshape(self.height, self.width, self.channels)

    def _in_8_bits(self, image: Image.Image, kind: str | None, place: str) -> Image.Image:
        """The image with the upper 8 of its bits."""
        if not image.mode.startswith(("I", "F")):
            return image
        if not image.mode.startswith("I;16") and (image.mode, kind) not in (("I", "PNG"), ("I", "PPM")):
            what = f"{place}: the image has 32 bits for a pixel (mode {image.mode})"
            remedy = "Convert it to 8 or 16 bits."
            raise DataError(f"{what}, and which value is white is not known.", field=SOURCES, remedy=remedy)
        values = np.asarray(image).astype(np.uint16)
        self.deepest = max(self.deepest, found := int(values.max()).bit_length())
        if found > self.bits:
            what = f"{place}: the image has the value {values.max():,}, which has more than {self.bits} bits."
            raise DataError(what, field=BITS, value=self.bits, remedy=f"Set {BITS}={found}.")
        return Image.fromarray((values >> (self.bits - 8)).astype(np.uint8))

    def _in_colours(self, image: Image.Image) -> Image.Image:
        """The image as RGB or grey."""
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            over = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
        return (image if image.mode in ("1", "L") else image.convert("RGB")).convert(self._mode)


def find_images(addresses: Sequence[str], *, field: str) -> Table:
    """The images of folders as a table: `image` (its path below), `label` (its folder), and `split` (the folder above).

    Raises:
        ConfigError: there are none. DataError: those of an address are not equally deep below it.
    """
    others: list[str] = []
    files, first = _find(addresses, {}, field, others), dict[str, str]()
    for file in files:
        one = first.setdefault(file.url, file.path)
        if one.count("/") != file.path.count("/"):
            what = f"Below {file.url}, {one} and {file.path} are not equally deep"
            what += ", and the folder of an image is its class."
            remedy = "Move or remove those of no class, or name the others by a pattern: prepare.sources=[FOLDER/*/*]."
            raise DataError(what, field=field, remedy=remedy)
    parts = [file.address.split("/") for file in files]
    columns: dict[str, Values] = {
        IMAGE: [file.path for file in files],
        FOLDER_LABEL: [names[-2] if len(names) > 1 else None for names in parts],
        SPLIT: [names[-3] if len(names) > 2 else None for names in parts],
        ADDRESS: [file.address for file in files],
    }
    table = Table([file.address for file in files], columns)
    if others:
        table.notes.append(f"{counted(len(others), 'file')} without images left out, such as {min(others)}.")
    return table


def read_image_table(addresses: Sequence[str], column: str, *, field: str, **form: Any) -> Table:
    """The rows of tables with a column of images' paths. Relative ones start from the folder of their table.

    Images among the addresses are not read here. `form` has arguments of `read_table`.

    Raises:
        ConfigError: there is no table. DataError: a table cannot be read, or a row names no image.
    """
    # Tables in a folder of images are read where no table is named.
    found = _find([address for address in addresses if format_of(address, FORMATS)] or addresses, FORMATS, field)
    tables = [file for file in found if format_of(file.path) is not None]
    if not tables:
        remedy = "Name the table, as in prepare.sources=[labels.csv, photos/], or leave prepare.options.image out."
        raise ConfigError("There is no table among the sources.", field=field, remedy=remedy)
    whole = Table([], {})
    for file in tables:
        part = read_table([file.address], field=field, **form)
        part.require(column, field="prepare.options.image")
        part.refuse_gaps(column, "Give every row the path of its image, or remove the row.")
        folder = file.address.rpartition("/")[0]
        paths = map(str, part.columns[column])
        part.columns[ADDRESS] = [
            path if not is_path(path) else absolute_path(path, folder) if is_path(folder) else f"{folder}/{path}"
            for path in paths
        ]
        whole.append(part, field=field)
    return whole


def _find(
    addresses: Sequence[str], tables: Mapping[str, str], field: str, others: list[str] | None = None
) -> list[RowFile]:
    """The images of the addresses, and tables of these endings; `others` gets the paths of other files."""
    endings = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
    with naming_sources(field):
        return find_row_files(addresses, {**tables, **dict.fromkeys(endings, "image")}, others)


def count_pixels(counts: dict[str, Any], pixels: np.ndarray) -> None:
    """Add an image ``[height, width, channels]`` to exact counts: pixels, sums and squares of channels."""
    whole = pixels.reshape(-1, pixels.shape[-1]).astype(np.int64)
    counts["pixels"] = counts.get("pixels", 0) + len(whole)
    for name, values in (("sums", whole), ("squares", whole**2)):
        before = counts.get(name, [0] * whole.shape[1])
        counts[name] = [old + new for old, new in zip(before, values.sum(axis=0).tolist(), strict=True)]


def mean_and_spread(counts: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of channels, with pixels from 0 to 1; a spread of 0 counts as 1."""
    number = max(counts.get("pixels", 0), 1)
    means = [total / number / 255 for total in counts["sums"]]
    squares = [total / number / 255**2 for total in counts["squares"]]
    spreads = [max(square - mean**2, 0.0) ** 0.5 for square, mean in zip(squares, means, strict=True)]
    return means, [spread if spread > 0 else 1.0 for spread in spreads]
