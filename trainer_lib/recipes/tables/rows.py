"""From the files of a table to rows of a recipe: the features or texts, the labels, and the splits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, compress, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from trainer_lib.data.rows.reading import FIELD as READ
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.shared import recipe_options
from trainer_lib.recipes.tables import cells, table_files
from trainer_lib.recipes.tables.splitting import cut_rows, read_split, require_train
from trainer_lib.recipes.tables.spooled_values import Spool, SpooledValues

if TYPE_CHECKING:
    from trainer_lib.recipes import PrepareOutput

FIELD = "prepare.options"
_RESERVED = ("labels", "row_id")
_PLAIN_NUMBER = re.compile(r"[-+]?(?!0\d)[\d.]+([eE][-+]\d+)?")  # 1E5 may be a name
_MEASURE = re.compile(r"[-+−(]?\W?\s*\d[\d.,'’\s]*\s*\D{0,4}")  # 12 kg or (1,234.50)
_AT_ONCE = 10_000  # numbers
_ROUNDING = 2.0**-20  # of a number in the batches, float32, times 8
_LISTED = 20  # problems
_FEW_CLASSES = 20  # more different labels such as 3.5 are amounts; whole numbers may be many classes


class TabularRows:
    """The rows of a table by split, ready for `prepare` to label.

    Attributes:
        options: the options, with defaults.
        target: the kind of the labels; empty where a recipe reads them itself.
        table: all rows.
        label: the column to predict.
        marks: the columns of 0 and 1 that the label was joined of.
        splits: split -> the numbers of its rows.
        numbers: feature -> mean and spread in the training rows.
        texts: feature -> the texts in the training rows.
        dates: feature -> the form of its dates in the files.
        parts: number that the network gets of a date or a free text -> mean and spread.
    """

    defaults: Mapping[str, Any] = recipe_options.DEFAULTS
    label_option: str = "label"
    """The option that names the column to predict."""
    unclassed: str | None = None
    """Why rows cannot be cut by class; None: they can."""

    def __init__(self, options: Mapping[str, Any], out: PrepareOutput) -> None:
        self.options = recipe_options.choose(options, self.defaults, field=FIELD)
        self.target = ""
        if self.defaults.keys() >= recipe_options.LABEL.keys():
            self.target = self.options["target"]
            recipe_options.require_choice(self.target, recipe_options.TARGETS, field=f"{FIELD}.target")
        self._has_class = self.target in (recipe_options.CLASS, recipe_options.ORDER)
        missing = self.options.get("missing", "refuse")
        recipe_options.require_choice(missing, ("refuse", "mean"), field=f"{FIELD}.missing")
        label = f"{FIELD}.{self.label_option}"
        named = self.options[self.label_option]
        self.marks: list[str] = named if isinstance(named, list) and self.target == recipe_options.SEVERAL else []
        if named is None or (isinstance(named, list) and len(self.marks) < 2):
            remedy = f"Name the column to predict: {label}=NAME."
            remedy += f" Classes with columns of 0 and 1: {label}=[A, B] and {FIELD}.target=several." if named else ""
            raise ConfigError("The recipe needs to know what to predict.", field=label, value=named, remedy=remedy)
        if self.marks:
            self.options[self.label_option] = table_files.JOINED
        of_several = "Rows of several classes have no class to cut by."
        unclassed = of_several if self.target == recipe_options.SEVERAL else self.unclassed
        way = read_split(self.options["split"], by="stratified" if self._has_class else "random", unclassed=unclassed)
        self._way = way["by"]
        self.table, self._problems = table_files.Table([], {}), list[DataError]()
        with table_files.naming_sources(table_files.SOURCES):
            with self._noting():
                self._set_up(way, out)
            raise_listed(self._problems)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what is wrong with the data, to name all of it together."""
        try:
            yield
        except DataError as error:
            self._problems.append(error)

    def _set_up(self, way: Mapping[str, Any], out: PrepareOutput) -> None:
        """Read the files, cut the rows into splits, and describe the features."""
        label = f"{FIELD}.{self.label_option}"
        self._warnings = out.warnings
        files = {name: [str(path)] for name, path in self.options["files"].items()} or {"": list(out.sources)}
        starts: dict[str, range] = {}
        for name, addresses in files.items():
            field = f"{FIELD}.files.{name}" if name else table_files.SOURCES
            part = self._read(addresses, field=field)
            starts[name] = range(len(self.table), len(self.table) + len(part))
            self.table.append(part, field=field)
        self.label = self.table.require(self.options[self.label_option], field=label)
        if self._has_class:
            self._refuse_amounts(label)
        kind = np.min_scalar_type(-len(self.table))
        by_file = {name: np.arange(rows.start, rows.stop, dtype=kind) for name, rows in starts.items() if name}
        self.splits = by_file or self._cut(way)
        require_train(self.splits)
        self._split_column = way["column"] if "" in starts else None
        self.numbers: dict[str, list[float]] = {}
        self.texts: dict[str, list[str]] = {}
        self.dates: dict[str, str] = {}
        self.parts: dict[str, list[float]] = {}
        if self.table.unread:
            self._warn(self.table.unread, "values that are neither numbers nor texts")
        features = self._features()
        if "missing" in self.options:
            with self._noting():
                self.table.refuse_gaps(self.label, "Give every row a label, or remove the row.")
            with self._noting():
                self._ids()
        for name in features:
            with self._noting():
                self._describe(name)
        if self._has_class or self.target == recipe_options.SEVERAL:
            self._warn_of_cases(self.label, self._codes[2])
        self._warnings += [*self.table.notes, *self.table.gap_notes()]

    def _warn(self, names: Iterable[str], why: str) -> None:
        columns = ", ".join(f"'{name}'" for name in names)
        self._warnings.append(f"The data is used without the column {columns}: {why}.")

    def _refuse_amounts(self, field: str) -> None:
        """Raise DataError where the label holds numbers that are no classes: nearly all differ, or have fractions."""
        numbers, values = self.table.numbers(self.label), self.table.count(self.label)
        numbers = numbers[np.isfinite(numbers)]
        most = (min if (numbers % 1).any() else max)(_FEW_CLASSES, values / 2)
        if 2 * len(numbers) > values and (different := table_files.count_different(numbers)) > most:
            what = f"The label '{self.label}' has {different:,} different numbers in {values:,} rows"
            remedy = f"Predict amounts ({FIELD}.target=number, or the recipe tabular-regression), or give few classes."
            raise DataError(f"{what}: amounts, not classes.", field=field, value=self.label, remedy=remedy)

    def _read(self, addresses: Sequence[str], *, field: str) -> table_files.Table:
        """The rows of some files."""
        chosen = self.options
        reading = cells.read_reading(chosen["read"])

        def named(value: Any, place: str) -> Any:
            plain = cells.plain_value(value, "", place, reading)
            return None if plain is None else cells.name_of(plain)

        def folded(value: Any, place: str) -> Any:
            plain = cells.plain_value(value, "", place, reading)
            return cells.fold(plain) if isinstance(plain, str) else plain

        readers: dict[str, table_files.Reader] = dict.fromkeys(chosen.get("categorical", ()), named)
        readers |= {**dict.fromkeys(chosen.get("merge", ()), folded), **self._readers(), chosen["id"]: cells.id_of}
        ignore = () if "features" in chosen else chosen["ignore"]  # there each name has to be a column
        return table_files.read_table(
            addresses,
            rename=chosen["rename"],
            field=field,
            readers=readers,
            read=chosen["read"],
            ignore=ignore,
            nested=[name for name in (*chosen.values(), *self.marks) if isinstance(name, str) and "." in name],
            marks=self.marks,
            bad=self._problems,
        )

    def _readers(self) -> dict[str, table_files.Reader]:
        """The columns whose values have a form of their own, such as a list of classes, with what reads them."""
        chosen = self.options
        if self.target != recipe_options.SEVERAL:
            return {}
        folds = chosen[self.label_option] in chosen.get("merge", ())
        return {chosen[self.label_option]: partial(cells.read_names, separator=chosen["label_separator"], folds=folds)}

    def _cut(self, way: Mapping[str, Any]) -> dict[str, np.ndarray]:
        keys: Sequence[str] = ()
        if way["column"] is not None:
            column = self.table.require(way["column"], field=f"{FIELD}.split.column")
            self.table.refuse_gaps(column, "Fill it in: without it the row belongs to no split.")
            keys = self.table.texts(column)
            if way["by"] == "group":
                self._warn_of_cases(column, dict.fromkeys(keys))
        labels = self._codes[1] if self._has_class else None
        return cut_rows(way, len(self.table), labels=labels, keys=keys, place=self.table.places.__getitem__)

    @cached_property
    def _codes(self) -> tuple[Any, np.ndarray, list[str]]:
        """The rows of the labels (a slice of all where all have one), the numbers of the labels, and their names."""
        if self.target != recipe_options.SEVERAL:
            return slice(None), *self.table.codes(self.label)
        lists = list(self.table.columns[self.label])
        names = sorted(set(chain.from_iterable(lists)))
        number = {name: index for index, name in enumerate(names)}
        codes = np.array([number[name] for name in chain.from_iterable(lists)], np.int64)
        return np.repeat(np.arange(len(lists)), list(map(len, lists))), codes, names

    def _labels_of(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows and the numbers of the labels of some rows."""
        rows, codes, _ = self._codes
        if self.target != recipe_options.SEVERAL:
            return chosen, codes[chosen]
        kept = np.frombuffer(self._mask(chosen), np.bool_)[rows]
        return rows[kept], codes[kept]

    def _features(self) -> list[str]:
        """The columns to predict from. Raises DataError for a name that the table does not have."""
        chosen = self.options
        for setting in ("ignore", "categorical", "features", "dates", "hashed", "merge"):
            for name in chosen[setting] or ():
                self.table.require(name, field=f"{FIELD}.{setting}")
        other = {self.label, chosen["id"], self._split_column, *chosen["ignore"]}
        names = [name for name in chosen["features"] or self.table.columns if name not in other]
        if not chosen["features"] and (index := [name for name in names if cells.is_index(name)]):
            is_first = index != [""] or next(iter(self.table.columns)) == ""
            why = "it is the index of a table that pandas wrote" if is_first else "it has no name"
            self._warn(index, f"{why} (prepare.options.features may name it)")
            names = [name for name in names if name not in index]
        if not names:
            remedy = "Leave prepare.options.features out, or name columns other than the label."
            raise DataError("No column is left to predict from.", field=f"{FIELD}.features", remedy=remedy)
        taken = next((name for name in names if name in _RESERVED), None)
        if taken is not None:
            remedy = f"Give it another name: prepare.options.rename.{taken}=NAME."
            raise DataError(f"The recipe uses the name '{taken}' itself.", field=f"{FIELD}.features", remedy=remedy)
        return names

    def _describe(self, name: str) -> None:
        if name in self.options["dates"] or name in self.options["hashed"]:
            self._describe_parts(name)
            return
        values = None if name in self.options["categorical"] else self.table.find_numbers(name)
        if values is None:
            self.table.refuse_free_text(name)
            self.texts[name] = sorted(set(compress(self.table.each_text(name), self._mask(self.splits["train"]))))
            self._warn_of_cases(name, self.texts[name])
            some = list(islice(filter(None, self.table.each_text(name)), _AT_ONCE))
            if some and cells.looks_like_date(some[0]):
                what = f"The column '{name}' looks like dates, and is read as texts"
                self._warnings.append(f"{what} (prepare.options.dates={{{name}: null}} reads dates).")
            elif not some:
                self._warnings.append(f"The column '{name}' has no values.")
            elif all(map(_MEASURE.fullmatch, some)):
                what = f"The column '{name}' is read as texts, such as '{some[0]}'"
                self._warnings.append(f"{what}: write amounts as numbers without other characters.")
            return
        if np.isnan(values).any():
            self._refuse_gaps(name, " and prepare.allow_nan=true")
        self._warn_of_forms(name)
        self.numbers[name] = self.scale(values)
        self._warnings += describe_rounding(name, *self.numbers[name])

    def _refuse_gaps(self, name: str, other: str = "") -> None:
        if self.options["missing"] == "refuse":
            remedy = f"Fill it in, leave the column out (prepare.options.ignore=[{name}]), or set "
            self.table.refuse_gaps(name, f"{remedy}prepare.options.missing=mean{other}.")

    def _describe_parts(self, name: str) -> None:
        if name in self.options["hashed"]:
            size = self.options["hashed"][name]
            if type(size) is not int or size < 1:
                raise ConfigError("This is a number of numbers.", field=f"{FIELD}.hashed.{name}", value=size)
            self._add_parts(name, {key: [0.0, size**-0.5] for key in cells.part_names([], {name: size})[name]})
            return
        self._refuse_gaps(name)
        setting, place = f"{FIELD}.dates.{name}", self.table.places.__getitem__
        form = self.options["dates"][name]
        dates, self.dates[name] = cells.iso_dates(
            self.table.texts(name), form, setting=setting, column=name, place=place
        )
        self.table.columns[name] = SpooledValues(Spool(), 1)
        self.table.columns[name].extend(dates)
        values = np.array([cells.date_parts(text) for text in dates], np.float64)
        self._add_parts(
            name, {f"{name}.{part}": self.scale(values[:, at].copy()) for at, part in enumerate(cells.PARTS)}
        )

    def _add_parts(self, name: str, parts: Mapping[str, list[float]]) -> None:
        if taken := sorted(parts.keys() & self.table.columns.keys()):
            remedy = f"Give it another name: prepare.options.rename.{taken[0]}=NAME."
            what = f"The numbers of '{name}' need the name '{taken[0]}' of another column."
            raise DataError(what, field=f"{FIELD}.features", remedy=remedy)
        self.parts.update(parts)

    def scale(self, values: np.ndarray) -> list[float]:
        """The mean and the spread of the training rows among numbers ``[rows]``, without those that are missing.

        Overwrites the numbers: a copy would be the most memory that a large table needs.
        """
        train, kept = np.frombuffer(self._mask(self.splits["train"]), np.bool_), 0
        for start in range(0, len(values), _AT_ONCE):
            some = values[start : start + _AT_ONCE]
            some = some[np.isfinite(some) & train[start : start + _AT_ONCE]]
            values[kept : kept + len(some)] = some
            kept += len(some)
        if not kept:
            return [0.0, 1.0]
        values = values[:kept]
        mean = float(values.mean())
        values -= mean
        spread = float(np.sqrt(np.square(values, out=values).mean()))  # `std` makes a copy
        # A constant column says nothing; dividing by its spread would make its noise large.
        return [mean, spread if spread > 0 else 1.0]

    def _warn_of_forms(self, name: str) -> None:
        """Say how numbers are read that are not plain, or may be thousands without exception."""
        texts = [text for text in islice(self.table.columns[name], _AT_ONCE) if isinstance(text, str)]
        odd = [text for text in texts if text not in cells.USUAL and not _PLAIN_NUMBER.fullmatch(text)]
        first = {cells.number_form(text): text for text in reversed(odd or texts)}  # of every form
        if odd:
            hint = f" (prepare.options.categorical=[{name}] reads names)" if any(map(str.isalnum, odd)) else ""
        elif ("?.", "") in first and (".", "") not in first:
            first, hint = {("?.", ""): first["?.", ""]}, f' ({READ}.decimal="," reads thousands)'
        else:
            return
        said = ", ".join(f"'{text}' is {cells.as_number(text):g}" for text in first.values())
        self._warnings.append(f"The column '{name}' is read as numbers: {said}{hint}.")

    def _warn_of_cases(self, name: str, texts: Iterable[str]) -> None:
        alike: dict[str | float, str] = {}
        for text in texts:
            if (other := alike.setdefault(meaning := _meaning(text), text)) != text:
                is_text = isinstance(meaning, str)
                why = "differ in case or blanks only" if is_text else "are one number"
                what = f"The column '{name}' has '{other}' and '{text}', which {why}"
                merges = is_text and "merge" in self.options
                hint = f" (prepare.options.merge=[{name}] makes them one)" if merges else ""
                self._warnings.append(f"{what} and count as two texts{hint}.")
                return

    def rows(
        self, labels: Sequence[Any] | None = None, more: Mapping[str, Sequence[Any]] | None = None
    ) -> dict[str, Iterator[dict[str, Any]]]:
        """For every split its rows: the features, `labels` ``[rows]``, `more` columns ``[rows]``, and `row_id`.

        Without `labels` they are the numbers in the column of the label.
        """
        ids = self._ids()
        read: dict[str, Callable[[Any], Any]] = dict.fromkeys(self.numbers, cells.as_number)
        read |= dict.fromkeys([*self.texts, *self.dates, *self.options.get("hashed", ())], cells.as_text)

        def cut(chosen: np.ndarray) -> Iterator[dict[str, Any]]:
            mask = self._mask(chosen)
            columns: dict[str, Iterator[Any]] = {name: compress(values, mask) for name, values in (more or {}).items()}
            for name in [column for column in read if column not in columns]:
                columns[name] = map(read[name], compress(self.table.columns[name], mask))
            names = ("row_id", *columns, "labels")
            known = map(cells.as_number, compress(self.table.columns[self.label], mask))
            last = known if labels is None else compress(labels, mask)
            for values in zip(compress(ids, mask), *columns.values(), last, strict=True):
                yield dict(zip(names, values, strict=True))

        return {split: cut(chosen) for split, chosen in self.splits.items()}

    def _mask(self, rows: np.ndarray) -> bytearray:
        """Bytes for the rows of the table, which say whether they are among these."""
        mask = bytearray(len(self.table))
        np.frombuffer(mask, np.bool_)[rows] = True
        return mask

    def _ids(self) -> Sequence[int | str]:
        name = self.options["id"]
        if name is None:
            return range(len(self.table))
        self.table.require(name, field=f"{FIELD}.id")
        self.table.refuse_gaps(name, "Give every row an id.")
        ids = self.table.columns[name]
        kinds = set(map(type, ids))
        digests = map(hash, self.table.each_text(name)) if str in kinds else ids
        if table_files.count_different(np.fromiter(digests, np.int64, len(ids))) != len(ids):
            raise DataError("Two rows have one id.", field=f"{FIELD}.id", value=name, remedy="Make the ids unique.")
        return self.table.texts(name) if len(kinds) > 1 else ids

    def classes(self) -> list[str]:
        """The classes in the training rows: as `order` has them, else numbers in their order, before texts.

        Raises:
            DataError: a label is missing, training has one class only, or a split has a label that training has not, or
                lacks a class; or classes are in no order.
        """
        self.table.refuse_gaps(self.label, "Give every row a label, or remove the row.")
        names, labels = self._codes[2], {split: self._labels_of(chosen) for split, chosen in self.splits.items()}
        counts = {split: np.bincount(codes, minlength=len(names)) for split, (_, codes) in labels.items()}
        known = sorted((names[code] for code in np.flatnonzero(counts["train"])), key=_in_order)
        if len(known) < 2 or counts["train"].sum() == len(known) * len(self.splits["train"]):
            shown = "' and '".join(known)
            what = f"All training rows have the label '{shown}', so there is nothing to learn."
            remedy = "Give rows of two classes or more" + ("." if len(known) < 2 else ", by the names that a row has.")
            raise DataError(what, field=f"{FIELD}.label", value=self.label, remedy=remedy)
        for split, (rows, codes) in labels.items():
            if len(new := np.flatnonzero((counts[split] > 0) & (counts["train"] == 0))):
                first = np.flatnonzero(np.isin(codes, new))[0]
                label = names[codes[first]]
                remedy = "Give train rows of it, or remove the row: `predict` takes rows without a label."
                if alike := [name for name in known if _meaning(name) == _meaning(label)]:
                    remedy = f"Write it as '{alike[0]}', as train does."
                what = f"{self.table.places[rows[first]]}: the label '{label}' in the split '{split}'"
                raise DataError(f"{what} is in no row of train.", field=f"{FIELD}.split", remedy=remedy)
            absent = sorted(set(known) - {names[code] for code in np.flatnonzero(counts[split])}, key=_in_order)
            if absent and self.target == recipe_options.SEVERAL:
                self._warnings.append(f"The split '{split}' has no row of the class '{absent[0]}'.")
            elif absent and not self.options["absent_classes"]:
                number = sum(count[names.index(absent[0])] for count in counts.values())
                what = f"The split '{split}' has no row of the class '{absent[0]}', of which there are {number} in all."
                other = self._has_class and (self.options["files"] or self._way != "stratified")
                way = "Split by stratified without files, give" if other else "Give"
                remedy = f"{way} more rows of it, or set {FIELD}.absent_classes=true."
                raise DataError(what, field=f"{FIELD}.split", remedy=remedy)
        if empty := [name for name in self.marks if name not in names]:
            self._warnings.append(f"The column '{empty[0]}' has no 1: it is no class.")
        if known[0] == "-1" and (cells.number_of(known[-1]) or 0) > 1:
            what = f"The label '{self.label}' has the class '-1', with which many data sets mark rows without a label"
            self._warnings.append(f"{what}: leave such rows out.")
        if absent := sorted(cells.USUAL.intersection(known)):
            what = f"The label '{self.label}' has the class '{absent[0]}', which other programs read as no value"
            self._warnings.append(f"{what}: leave such rows out, or name it in {READ}.na_values.")
        return self._ordered(known) if self.target == recipe_options.ORDER else known

    def _ordered(self, known: Sequence[str]) -> list[str]:
        order, field = list(map(cells.text_of, self.options["order"])), f"{FIELD}.order"
        if not order and all(cells.number_of(name) is not None for name in known):
            return list(known)
        if len(set(order)) < len(order) or (new := next((name for name in known if name not in order), None)):
            what = "A class is there twice." if len(set(order)) < len(order) else f"The class '{new}' has no place."
            remedy = f"Name the classes in their order, the least first: {field}=[{', '.join(known)}]."
            raise DataError(what, field=field, value=order, remedy=remedy)
        return [name for name in order if name in known]

    def class_numbers(self, classes: Sequence[str]) -> Sequence[Any]:
        """The numbers of the rows' classes among these ``[rows]``; of several classes 0 or 1 for all of these."""
        rows, codes, names = self._codes
        number = {name: index for index, name in enumerate(classes)}
        numbers = np.array([number[name] for name in names], np.min_scalar_type(len(names)))
        if self.target != recipe_options.SEVERAL:
            return memoryview(numbers[codes])
        whole: Any = np.zeros((len(self.table), len(classes)), np.uint8)
        whole[rows, numbers[codes]] = 1
        return whole  # type: ignore[no-any-return]

    def label_scale(self) -> list[float]:
        """The mean and the spread of the training labels. Raises DataError for one that is missing or not a number."""
        numbers = self.table.find_numbers(self.label)
        self.table.refuse_gaps(self.label, "Give every row a label, or remove the row.")
        if numbers is None:
            what = f"The label '{self.label}' holds texts, such as '{next(self.table.each_text(self.label))}'."
            remedy = "Use the recipe tabular-classification, or leave prepare.options.target out."
            raise DataError(what, field=f"{FIELD}.label", remedy=remedy)
        mean, spread = self.scale(numbers)
        self._warnings += describe_rounding(self.label, mean, spread)
        return [mean, spread]

    def info(self) -> dict[str, Any]:
        """Facts of the features for `build_model` and for predictions of new rows, as JSON."""
        number = "number" if self.options["missing"] == "refuse" else "number?"
        chosen, merged = self.options, set(self.options["merge"])
        columns = {name: self.table.kind_of_numbers(name) + number.removeprefix("number") for name in self.numbers}
        columns |= {name: "folded?" if name in merged else "text?" for name in (*self.texts, *chosen["hashed"])}
        columns |= dict.fromkeys((name for name in chosen["categorical"] if columns.get(name) == "text?"), "name?")
        columns |= {name: f"date:{form}{number.removeprefix('number')}" for name, form in self.dates.items()}
        dropped = [name for name in (*self.table.columns, *self.table.unread, *self.marks) if name not in columns]
        form = table_files.note_form(columns, self.options, dropped=dropped)
        if self.target == recipe_options.NUMBER:
            form[table_files.NOTE]["answer"] = self.table.kind_of_numbers(self.label)
        found = {"label": self.label, "numbers": {**self.numbers, **self.parts}, "texts": self.texts, **form}
        made = {"dates": list(self.dates), "hashed": dict(chosen["hashed"])}
        return found | {name: value for name, value in made.items() if value}


class TextRows(TabularRows):
    """The texts of a table by split; no other column is read."""

    text_options: Sequence[str] = ("text",)
    """The options that name the columns with texts."""
    reserved: Sequence[str] = _RESERVED
    """Names of columns that the recipe has itself."""
    unclassed: str | None = "Pairs of texts have no class to cut by."

    @override
    def _features(self) -> list[str]:
        for option in self.text_options:
            name, field = self.options[option], f"{FIELD}.{option}"
            if name is None:
                what, remedy = "The recipe needs to know where the texts are.", f"Name the column: {field}=NAME."
                raise ConfigError(what, field=field, remedy=remedy)
            self.table.require(name, field=field)
            if name == self.label and option not in (self.label_option, "query"):  # a query may be its own answer
                remedy = f"Name another column: {field}=NAME."
                raise ConfigError("A text cannot be what is predicted from it.", field=field, value=name, remedy=remedy)
            if name in self.reserved:
                remedy = f"Give it another name: prepare.options.rename.{name}=NAME."
                raise DataError(f"The recipe uses the name '{name}' itself.", field=field, remedy=remedy)
            self.table.refuse_gaps(name, "Remove the row, or give it a text.")
        return []

    def texts_of(self, option: str) -> list[str]:
        """The texts in the column that an option names ``[rows]``."""
        return self.table.texts(self.options[option])


def raise_listed(problems: Sequence[DataError]) -> None:
    """Raise the first problem, with a list of all of them where there are several, and what settles them."""
    if not problems:
        return
    first, *others = problems
    if not others:
        raise first
    lines = [f"  {problem.message}\n    -> {table_files.remedy_of(problem)}" for problem in problems[:_LISTED]]
    lines += [f"  and {len(problems) - _LISTED:,} more"] if len(problems) > _LISTED else []
    what = "\n".join([f"{first.message}\n", "All that prepare-data found:", *lines])
    raise DataError(what, field=first.field, value=first.value, remedy=first.remedy)


def describe_rounding(name: str, mean: float, spread: float) -> list[str]:
    """A sentence about a column of numbers whose differences 32 bits lose; none for another. A spread of 1 may be 0."""
    is_constant = spread == 1.0 and abs(mean) < 2**53  # from there on 64 bits round too
    if abs(mean) * _ROUNDING <= spread or is_constant:
        return []
    what = f"The numbers of the column '{name}' differ by some {spread:.3g} around {mean:.10g}"
    return [f"{what}, which 32 bits round: subtract a constant from them."]


def _meaning(text: str) -> str | float:
    """The number that a text is, or else the text without what case and blanks say."""
    return cells.fold(text) if (number := cells.number_of(text)) is None else number


def _in_order(name: str) -> tuple[float, str]:
    """Sorts 2 before 10, and numbers before texts."""
    try:
        return float(name), name
    except ValueError:
        return float("inf"), name
