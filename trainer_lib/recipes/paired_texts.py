"""Pairs of texts of a table: what is read, and what is to be written or found."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.tabular_rows import FIELD, TabularRows


class PairedTexts(TabularRows):
    """The pairs of a table by split; no other column is read. Its two options name the columns."""

    text_option = "text"
    label_option = "target"
    reserved: Sequence[str] = ("labels", "row_id")
    """Names of columns that the recipe has itself."""

    @override
    def _features(self) -> list[str]:
        if self.options["split"].get("by") == "stratified":
            remedy = "Set prepare.options.split.by to random, group, time or column."
            raise ConfigError("Pairs of texts have no class to cut by.", field=f"{FIELD}.split.by", remedy=remedy)
        for option in self._text_options():
            name = self.options[option]
            if name is None:
                what = "The recipe needs to know where the texts are."
                remedy = f"Name the column: {FIELD}.{option}=NAME."
                raise ConfigError(what, field=f"{FIELD}.{option}", remedy=remedy)
            self.table.require(name, field=f"{FIELD}.{option}")
            if name in self.reserved:
                remedy = f"Give it another name: prepare.options.rename.{name}=NAME."
                raise DataError(f"The recipe uses the name '{name}' itself.", field=f"{FIELD}.{option}", remedy=remedy)
            self.table.refuse_gaps(name, "Remove the row, or give it a text.")
        return []

    def _text_options(self) -> tuple[str, ...]:
        """The options that name the columns with texts."""
        return (self.text_option, self.label_option)

    def pairs(self) -> tuple[list[str], list[str]]:
        """What is read, and what belongs to it, of each row."""
        return self.table.texts(self.options[self.text_option]), self.table.texts(self.label)
