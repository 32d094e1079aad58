"""Tables of plain text, for every command that lists something."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from trainer_lib.base.foreign_text import to_cell

_WIDEST = 120


def table(
    rows: Sequence[Sequence[str]],
    styles: Sequence[Sequence[str]] = (),
    *,
    right: frozenset[int] = frozenset(),
    bare: bool = False,
) -> list[Text]:
    """Lines of a table whose first row is its head; the last column is not padded.

    Args:
        rows: the cells; every row has the same number of them.
        styles: of the cells of the rows after the head; missing ones are plain.
        right: columns whose cells stand at the right.
        bare: leave the head out.
    """
    # A name of a stranger neither breaks a line nor widens a column without end.
    rows = [[*(to_cell(cell, _WIDEST) for cell in row[:-1]), to_cell(row[-1])] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for place, row in enumerate(rows):
        own = styles[place - 1] if 0 < place <= len(styles) else ()
        cells: list[tuple[str, str]] = []
        for column, cell in enumerate(row):
            is_last = column == len(row) - 1
            padded = cell.rjust(widths[column]) if column in right else cell if is_last else cell.ljust(widths[column])
            style = "dim" if place == 0 else own[column] if column < len(own) else ""
            cells.append((padded if is_last else f"{padded}  ", style))
        lines.append(Text.assemble(*cells))
    return lines[1:] if bare else lines
