"""Differences of a recipe's code between two keys, in the words of the one who edited it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trainflow.tasks.code.reach import ORDER, SOURCE, Place
from trainflow.tasks.keys.keys import Difference

_FIELD = "recipe."


def describe_code(
    changed: Iterable[Difference], before: Mapping[str, Any] | None, now: Mapping[str, Place]
) -> list[Difference]:
    """The differences, those of code with a sentence: what changed itself first, then what it newly uses or left.

    Args:
        before: places of the older key, as ``key.json`` has them.
        now: places of the newer key.
    """
    others: list[Difference] = []
    code: list[tuple[int, Difference]] = []
    for difference in changed:
        label = difference.field.removeprefix(_FIELD)
        if not difference.field.startswith(_FIELD) or ":" not in label:
            others.append(difference)
            continue
        place = now.get(label) or _place((before or {}).get(label))
        sentence, rank = _sentence(label, place, difference)
        code.append((rank, replace(difference, sentence=sentence)))
    code.sort(key=lambda change: change[0])
    described = [difference for _, difference in code]
    # An order that differs because something came or went says nothing new.
    if any(not _is_order(change) for change in described):
        described = [change for change in described if not _is_order(change)]
    return [*_without_edited_statements(described), *others]


def _sentence(label: str, place: Place | None, difference: Difference) -> tuple[str, int]:
    file, _, name = label.partition(":")
    where = f"{file}:{place.line}" if place is not None else file
    # This stage does not name it: code of the stage may reach any name.
    because = f", which counts because of {place.because}" if place is not None and place.because else ""
    change = "added" if difference.old is None else "removed" if difference.new is None else "changed"
    if name == ORDER:
        return f"the order of statements changed ({file})", 3
    if name == SOURCE:
        return f"the text changed ({file}), which the recipe reads itself", 3
    if name.startswith("#"):
        text = f": {place.text}" if place is not None and place.text else ""
        return f"a statement that runs at import {change} ({where}{text}){because}", 1
    imported = name.removeprefix("import ")
    if imported != name:
        return f"the import of {imported} {change} ({where}){because}", 2
    rank = 0 if change == "changed" else 1
    return f"{name} {change} ({where}){because}", rank


def _place(record: Any) -> Place | None:
    if isinstance(record, list) and len(record) in (2, 3) and isinstance(record[0], int):
        return Place(record[0], *(str(part) for part in record[1:]))
    return None


def _is_order(difference: Difference) -> bool:
    return difference.field.endswith(f":{ORDER}")


def _without_edited_statements(found: list[Difference]) -> list[Difference]:
    """An edited statement without a name comes as one that went and one that came: it counts as changed."""
    gone = [_file(change) for change in found if _is_statement(change) and change.new is None]
    came = [_file(change) for change in found if _is_statement(change) and change.old is None]
    kept: list[Difference] = []
    for change in found:
        if _is_statement(change) and change.new is None and _file(change) in came:
            came.remove(_file(change))
            continue
        if _is_statement(change) and change.old is None and _file(change) in gone:
            gone.remove(_file(change))
            change = replace(change, sentence=(change.sentence or "").replace(" added (", " changed (", 1))
        kept.append(change)
    return kept


def _is_statement(difference: Difference) -> bool:
    return difference.field.removeprefix(_FIELD).partition(":")[2].startswith("#")


def _file(difference: Difference) -> str:
    return difference.field.removeprefix(_FIELD).partition(":")[0]
