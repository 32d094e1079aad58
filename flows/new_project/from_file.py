"""Writes a new project for files that are there: a spec with guesses, and their reasons as comments.

The guesses are of the first rows: which column is predicted, what the columns are, and what looks wrong.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainer_lib.base.suggestions import counted
from trainer_lib.data.rows.reading import Reading
from trainer_lib.data.rows.row_files import read_rows
from trainer_lib.data.rows.row_sources import find_row_files
from trainer_lib.errors import DataError, TrainflowError
from trainer_lib.recipes.tables import cells
from trainer_lib.recipes.tables.table_files import SAME, Table, naming_sources

_ROWS = 20_000  # that are looked at
_AMOUNTS = ("price", "sales", "saleprice")
_LABELS = (
    *("label", "labels", "target", "class", "y", "outcome", "churn", "churned", "survived", "diagnosis", "result"),
    *("sentiment", "species"),
    *_AMOUNTS,
)
_ID = re.compile(r"(?i:(.*[_\s.-])?(id|key|uuid|nr|number)|index)|.*[a-z](ID|Id|Nr)")
_BLANK = re.compile(r"\s")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # which YAML reads as something else
_ZEROS = re.compile(r"0\d+")  # no amounts: a postcode, the number of a customer
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
_FEW = 20  # a label with more different numbers is an amount, unless they count classes from 0 or 1 on
_MOST_NAMES = 50
_ALONE = 0.99  # of the held-out labels that one column predicts: a suspected leak
_FEWEST_ROWS = 40
_BETWEEN = (";", "|", ",")  # several classes in a cell
_OFTEN = 0.05  # of the cells have one of them
_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_RATINGS = 11  # whole numbers that may be an order
_OF_TEXTS: Sequence[tuple[set[str], str, dict[str, str]]] = (
    ({"chosen", "rejected"}, "preference-optimization", {}),
    *((names, "supervised-fine-tuning", {}) for names in ({"messages"}, {"conversations"}, {"instruction", "output"})),
    ({"prompt", "completion"}, "supervised-fine-tuning", {}),
    ({"context", "question", "answers"}, "question-answering", {}),
    ({"words", "tags"}, "token-classification", {}),
    ({"tokens", "ner_tags"}, "token-classification", {"options": "words: tokens\nlabel: ner_tags"}),
)
"""Columns of rows, their recipe, and what its template does not say."""


@dataclass
class Guess:
    """A guess of what files are."""

    recipe: str = ""
    # `prepare.options`, by their names, with comments.
    options: dict[str, tuple[Any, str]] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)  # what looks wrong, as sentences
    by: str = "stratified"  # how rows are cut; empty where the options say it
    margin: str = "accuracy_over_majority"  # the metric that a model without any input has 0 of
    model: str = "{hidden: [64], dropout: 0.1}"  # `train.model`

    @property
    def has_gaps(self) -> bool:
        """Whether numbers are missing, or dates."""
        return "missing" in self.options


def _guess_images(address: str) -> Guess:
    """The guess of a folder of images, whose folders are their classes."""
    from trainer_lib.recipes.tables.image_files import FOLDER_LABEL, SPLIT, USUAL_SPLITS, find_images

    columns = find_images([address], field="--from").columns
    classes = Counter(map(str, columns[FOLDER_LABEL]))
    shown = ", ".join(f"{name} ({rows:,})" for name, rows in classes.most_common(_FEW))
    found = Guess("image-classification", {"size": (64, "pixels of a side")}, [f"Classes by their folders: {shown}."])
    found.model = "{channels: [16, 32, 64], augment: {shift: 0.1}}"
    if {str(name).lower() for name in columns[SPLIT]} <= USUAL_SPLITS:
        found.by, found.options["split"] = "", ({"by": "column", "column": "split"}, "the folders above are splits")
    return found


class Guesses(Guess):
    """The guess of a table, a file or a pattern; also of the column to predict, where no `label` names it."""

    def __init__(self, address: str, label: str | None) -> None:
        super().__init__()
        self._ignored: dict[str, str] = {}
        self._lists: set[str] = set()
        self._numbers: dict[str, np.ndarray] = {}
        self._kinds: dict[str, Any] = {"read": {}, "dates": {}, "hashed": {}, "merge": [], "categorical": []}
        self._table = self._read(address)
        self._label = self._find_label(label)
        self.recipe = self._find_recipe()
        for name in [name for name in self._table.columns if name != self._label]:
            self._look_at(name)
        if not self.has_several:
            self._find_merged(self._label, self._table.texts(self._label))
        self._keep_a_feature()
        marks = [name for name, values in self._table.columns.items() if {str(value) for value in values} == {"0", "1"}]
        if self._label in marks and len(marks) > 2:
            what = f"Columns {', '.join(marks)} have 0 and 1. If several are labels, write label: [A, B]"
            self.comments.append(f"{what}, target: several, and split: {{by: random, …}}.")
        if self.has_several:
            self.by, self.margin = "random", "average_precision_over_chance"
        elif self.recipe == "tabular-regression":
            self.by, self.margin = "random", "rmse_below_mean"
        self._write_options()
        self._find_leaks()
        self._find_twice()

    @property
    def has_several(self) -> bool:
        """Whether a row has any number of classes."""
        return "target" in self.options

    def _read(self, address: str) -> Table:
        table, bad, differ = Table([], {}), list[DataError](), False
        with naming_sources("--from"):
            for place, row in islice(read_rows(find_row_files([address]), table.notes, Reading(), bad), _ROWS):
                if not isinstance(row, Mapping):
                    raise DataError("The rows have no columns.", field="--from", value=address)
                differ = differ or (bool(table.places) and row.keys() != table.columns.keys())
                for name in [name for name in row if name not in table.columns]:
                    table.columns[name] = [None] * len(table.places)
                for name, values in table.columns.items():
                    values.append(self._plain(table, row.get(name), name))
                table.places.append(place)
        if not table.places:
            raise bad[0] if bad else DataError("The file has no rows.", field="--from", value=address)
        self.comments += table.notes
        if bad:
            self.comments.append(f"{counted(len(bad), 'row')} cannot be read; the first: {bad[0].message}")
        if differ:
            self.comments.append(f"Rows lack columns, which prepare-data refuses: {SAME}.")
        for name in table.unread:
            del table.columns[name]
            self.comments.append(f"Column {name} has lists or objects, and is left out.")
        return table

    def _plain(self, table: Table, value: Any, name: str) -> Any:
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            self._lists.add(name)
            return _BETWEEN[0].join(value)
        try:
            return cells.plain_value(value, name, "", Reading())
        except DataError as error:
            table.unread.setdefault(name, error.message)
            return None

    def _find_label(self, label: str | None) -> str:
        names = [name for name in self._table.columns if not cells.is_index(name)]
        if label is not None:
            self.options["label"] = label, ""
            return self._table.require(label, field="--label")
        lower = {name.lower(): name for name in names}
        if not names:
            what = f"No column has numbers or texts: {', '.join(map(repr, self._table.unread))}."
            raise DataError(what, field="--from", remedy="Write a table, or one JSON object a row.")
        if odd := next((name for name in self._table.unread if name.lower() in _LABELS), None):
            what = f"The column '{odd}' has the name of a label, and lists or objects, which are none."
            remedy = (
                "Name another (--label NAME). Of spans of characters make words and their tags: docs/recipes/tags.md."
            )
            raise DataError(what, field="--from", remedy=remedy)
        named = (lower[name] for name in _LABELS if name in lower)
        known = next((name for name in named if len(set(self._table.columns[name])) > 1), None)
        usual = [name for name in names if not _ID.fullmatch(name) and name not in self._lists]
        usual = [name for name in usual if self._may_be_label(name)]
        if not (known or usual):
            left_out = "".join(f" Column {name} has lists or objects." for name in self._table.unread)
            what = f"No column looks like a label: ids, dates and texts that nearly all differ are none.{left_out}"
            remedy = "Name it (--label NAME), or choose a recipe and look at its sample: trainflow init NAME --recipe …"
            raise DataError(what, field="--from", value=", ".join(names), remedy=remedy)
        found = known or usual[-1]
        self.options["label"] = found, f"guess: {'its name' if known else 'the last column'}"
        return found

    def _may_be_label(self, name: str) -> bool:
        texts = [str(value) for value in self._table.columns[name] if value is not None]
        different = set(texts)
        if len(different) < 2 or cells.looks_like_date(texts[0]):
            return False
        few = len(different) <= max(_MOST_NAMES, len(texts) / 2)
        return few or 2 * sum(_read_number(text) is not None for text in texts) > len(texts)

    def _find_recipe(self) -> str:
        for name in self._lists - {self._label}:
            del self._table.columns[name]
            self.comments.append(f"Column {name} has lists, and is left out.")
        if self._label in self._lists or (separator := self._find_separator()):
            self.options["target"] = "several", "a row has any number of classes"
            if self._label not in self._lists:
                self.options["label_separator"] = separator, ""
            return "tabular-classification"
        texts = [str(value) for value in self._table.columns[self._label] if value is not None]
        if gaps := len(self._table) - len(texts):
            self.comments.append(f"{counted(gaps, 'row')} without a label: remove them, prepare-data refuses them.")
        numbers = np.array([number for number in map(_read_number, texts) if number is not None])
        if 2 * len(numbers) <= len(texts):
            return "tabular-classification"
        if self._are_amounts(numbers):
            return self._choose_amounts(texts)
        if len(numbers) == len(texts) and 2 < len(set(numbers.tolist())) <= _RATINGS and not (numbers % 1).any():
            self.comments.append("If the numbers of the label are ratings, their order counts: target: order.")
        return "tabular-classification"

    def _are_amounts(self, numbers: np.ndarray) -> bool:
        different = len(set(numbers.tolist()))
        if self._label.lower() in _AMOUNTS:
            return different > 2
        if (numbers % 1).any():
            return different > min(_FEW, len(numbers) / 2)
        are_counted = numbers.min() in (0, 1) and numbers.max() - numbers.min() < different <= len(numbers) / 2
        return different > _FEW and not are_counted

    def _choose_amounts(self, texts: Sequence[str]) -> str:
        label, why = self.options["label"]
        amounts = f"{len(set(texts))} different numbers: amounts"
        self.options["label"] = label, f"{why}; {amounts}" if why else amounts
        self._is_number(label, texts)
        self.options.pop("missing", None)
        if label in self._ignored:
            self.comments.append(f"The label has {self._ignored.pop(label).partition(':')[0]}: mend them.")
        return "tabular-regression"

    def _find_separator(self) -> str | None:
        """The mark between several classes in the cells of the label; None: they have one class."""
        texts = [str(value) for value in self._table.columns[self._label] if isinstance(value, str)]
        if all(_read_number(text) is not None for text in texts):
            return None
        for mark in _BETWEEN:
            divided = [[part.strip() for part in text.split(mark) if part.strip()] for text in texts]
            parts = Counter(part for cell in divided for part in cell)
            often = sum(len(cell) > 1 for cell in divided) > _OFTEN * len(texts)
            if often and len(parts) <= min(_MOST_NAMES, len(set(texts))) and min(parts.values()) > 1:
                return mark
        return None

    def _look_at(self, name: str) -> None:
        values = [value for value in self._table.columns[name] if value is not None]
        texts = [str(value) for value in values]
        different = len(set(texts))
        if cells.is_index(name) or different < 2:
            self._ignored[name] = "the index of a table" if cells.is_index(name) else "always the same"
        elif _ID.fullmatch(name) and different == len(self._table) and "id" not in self.options:
            self.options["id"] = name, "guess: its name, and all values differ; it is no feature"
        elif _ID.fullmatch(name) and different > _FEW and not self._is_number(name, texts):
            self._ignored[name] = "names of things"
            if different < 0.9 * len(texts):
                self.comments.append(f"If rows of one {name} are alike: split: {{by: group, column: {_yaml(name)}}}.")
        elif cells.looks_like_date(texts[0]):
            self._look_at_dates(name)
        elif not self._is_number(name, texts):
            self._look_at_texts(name, texts, different)

    def _is_number(self, name: str, texts: Sequence[str]) -> bool:
        if any(map(_ZEROS.fullmatch, texts)):
            return False
        others = Counter(text for text in texts if cells.number_of(text) is None and text not in cells.USUAL)
        are_thousands = bool(others) and all(map(_THOUSANDS.fullmatch, others))
        if 2 * sum(others.values()) > len(texts) and not are_thousands:
            return False
        if are_thousands:
            self._kinds["read"]["thousands"] = ","
            self.comments.append(f"Column {name} has numbers such as {next(iter(others))}: read as thousands.")
        elif others and len(others) <= 3:
            self._kinds["read"].setdefault("na_values", []).extend(others)
            self.comments.append(f"Column {name} has numbers, and {', '.join(map(repr, others))}: read as no value.")
        elif others:
            shown = ", ".join(map(repr, islice(others, 3)))
            self._ignored[name] = f"numbers among texts such as {shown}: mend them, or name it in categorical"
            return True
        values = self._table.columns[name]
        if are_thousands:
            values = [None if value is None else Reading(thousands=",").with_point(str(value)) for value in values]
        read = (None if value is None else cells.number_of(value) for value in values)
        numbers = np.array([np.nan if number is None else number for number in read], np.float64)
        self._numbers[name] = numbers
        if np.isnan(numbers).any():
            self.options["missing"] = "mean", "numbers are missing"
        return True

    def _look_at_dates(self, name: str) -> None:
        try:
            dates, _ = cells.iso_dates(
                self._table.texts(name), None, setting=name, column=name, place=lambda row: self._table.places[row]
            )
        except DataError as error:
            self._ignored[name] = f'dates; give their form: dates: {{{_yaml(name)}: "%d/%m/%Y"}}'
            self.comments.append(error.message)
            return
        self._kinds["dates"][name] = None
        self.comments.append(
            f"Column {name} has dates: to test on the newest rows, split: {{by: time, column: {_yaml(name)}}}."
        )
        if "" in dates:
            self.options["missing"] = "mean", "dates are missing"

    def _look_at_texts(self, name: str, texts: Sequence[str], different: int) -> None:
        if different <= max(_MOST_NAMES, len(self._table) / 2):
            self._find_merged(name, texts)
            if any(map(_ZEROS.fullmatch, texts)):
                self._kinds["categorical"].append(name)
        elif np.mean([len(text.split()) for text in texts]) >= 3:
            self._kinds["hashed"][name] = 64
            self.comments.append(f"Column {name} has free texts, whose words are hashed; or text-classification.")
        elif different == len(self._table) and "id" not in self.options and not any(map(_BLANK.search, texts)):
            self.options["id"] = name, "guess: all values differ"
        else:
            self._ignored[name] = "texts that nearly all differ"

    def _keep_a_feature(self) -> None:
        """Hash the words of the column of texts, where without it no feature is left."""
        others = {self._label, *self._ignored, *self.options.get("id", ())[:1]}
        texts = [name for name, why in self._ignored.items() if why == "texts that nearly all differ"]
        if texts and others >= self._table.columns.keys():
            del self._ignored[texts[0]]
            self._kinds["hashed"][texts[0]] = 64

    def _find_merged(self, name: str, texts: Sequence[str]) -> None:
        names = set(texts) - cells.NOTHING
        if len({cells.fold(text) for text in names}) < len(names) and self.recipe == "tabular-classification":
            self._kinds["merge"].append(name)

    def _write_options(self) -> None:
        reasons = {
            "read": "",
            "dates": "null: the one form that fits; or such as %d/%m/%Y",
            "hashed": "numbers that the words of a text become",
            "merge": "texts differ in case or blanks only",
            "categorical": "zeros in front: names",
        }
        self.options |= {name: (value, reasons[name]) for name, value in self._kinds.items() if value}
        if self._ignored:
            reason = "; ".join(f"{name or 'no name'}: {why}" for name, why in self._ignored.items())
            self.options["ignore"] = list(self._ignored), reason

    def _find_leaks(self) -> None:
        used = [name for name in self._table.columns if name != self._label and name not in self._ignored]
        used = [name for name in used if name != self.options.get("id", ("",))[0]]
        if len(self._table) < _FEWEST_ROWS:
            return
        for name in used:
            if (share := self._predicts_alone(name)) > _ALONE:
                self.comments.append(
                    f"LEAK? {name} alone predicts {share:.0%} of the label: is it known before? Else ignore it."
                )

    def _predicts_alone(self, name: str) -> float:
        """The score of a small tree that predicts the labels of every other row by a column, learned from the rest."""
        from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

        values = self._numbers.get(name)
        codes, names = (values, []) if values is not None else self._table.codes(name)
        is_class = self.recipe == "tabular-classification"
        labels = self._table.codes(self._label)[0] if is_class else self._table.numbers(self._label)
        if (
            len(names) > _MOST_NAMES
            or (is_class and 2 * len(set(labels.tolist())) > len(labels))
            or not np.isfinite(labels.astype(np.float64)).all()
        ):
            return 0.0
        if is_class and np.bincount(labels).max() > _ALONE * len(labels):
            return 0.0
        if not is_class and values is not None and np.isfinite(values).all() and values.std() > 0:
            return float(np.corrcoef(values, labels)[0, 1] ** 2)
        inputs = np.nan_to_num(np.asarray(codes, np.float64), nan=-1e9)[:, None]
        kind = DecisionTreeClassifier if is_class else DecisionTreeRegressor
        # Few leaves for numbers: those of sorted rows would tell neighbours.
        tree = kind(max_leaf_nodes=2 * _MOST_NAMES if names else 8, min_samples_leaf=3, random_state=0)
        return float(tree.fit(inputs[::2], labels[::2]).score(inputs[1::2], labels[1::2]))

    def _find_twice(self) -> None:
        left_out = self.options.get("id", ("",))[0]
        columns = [values for name, values in self._table.columns.items() if name != left_out]
        twice = len(self._table) - len(set(zip(*columns, strict=True)))
        if twice:
            rows = f"{counted(twice, 'row')} in {len(self._table):,}"
            self.comments.append(f"{rows} are there before: they may fall into train and test. Remove them.")


def _yaml(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_yaml(name)}: {_yaml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


def source_from(folder: Path, address: str) -> tuple[str, str]:
    """The address of files, absolute, and as a spec in `folder` writes it."""
    absolute = address if "://" in address else os.path.abspath(address)  # noqa: PTH100 - may be a pattern
    return absolute, _yaml(min(absolute, absolute if "://" in address else os.path.relpath(absolute, folder), key=len))


def guess_spec(folder: Path, address: str, label: str | None) -> dict[str, Any]:
    """The parts of a spec in `folder` for a file, as guessed.yaml.j2 names them. Raises ConfigError, DataError."""
    absolute, source = source_from(folder, address)
    guesses = _guess_images(absolute) if _is_of_images(absolute) else Guesses(address, label)
    return {
        "guesses": guesses,
        "comments": [" ".join(sentence.split()) for sentence in guesses.comments],  # in one line
        "source": source,
        "options": [line for name, (value, why) in guesses.options.items() for line in _option(name, value, why)],
    }


def find_recipe_of_texts(address: str) -> tuple[str, dict[str, str]] | None:
    """The recipe of rows with conversations, judged answers, questions or tagged words, with facts for its template.

    None: a table, or no file of rows. The columns of the first row are those that these recipes know by their usual
    names.
    """
    with suppress(TrainflowError):
        _, row = next(read_rows(find_row_files([address]), [], Reading(), []), ("", None))
        names = set(row) if isinstance(row, Mapping) else set()
        return next(((recipe, facts) for columns, recipe, facts in _OF_TEXTS if names >= columns), None)
    return None


def _is_of_images(address: str) -> bool:
    """Whether a folder on this machine has images and no table."""
    try:
        find_row_files([address])
    except TrainflowError:
        folder = Path(address)
        return folder.is_dir() and any(path.suffix.lower() in _IMAGES for path in folder.rglob("*"))
    return False


def _read_number(text: str) -> float | None:
    """The number that a text is, also with commas between thousands; None for another text."""
    return cells.number_of(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)


def _option(name: str, value: Any, why: str) -> list[str]:
    line = f"{name}: {_yaml(value)}"
    if why and len(line) + len(why) > 90:
        return [f"# {' '.join(why.split())}", line]
    return [f"{line}  # {why}" if why else line]
