"""Packs tokenized documents into rows of one length, so that next to none of their positions are padding.

    rows = pack_documents(documents, length=1024, overlong="split", packed=True, counts=counts)

Documents are collected up to a number of tokens (a window), their pieces are packed by best fit in the order of
decreasing lengths, and the window's rows are given before the next one is read: memory is bounded, and equal documents
give equal rows. Pieces keep their boundaries, by which a batch keeps documents apart (`packed_batches`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer_lib.data.rows.mixture import SOURCE
from trainer_lib.errors import DataError
from trainer_lib.recipes.shared.recipe_options import require_choice

FIELD = "prepare.options.overlong"
POLICIES = ("split", "drop", "refuse")
WINDOW = 1 << 22
"""Tokens that are packed together: 16 MiB of them."""


class Document(NamedTuple):
    """A tokenized document: where it is from, its tokens ``[tokens]``, and which are trained; None: all of them.

    `source`: the name of its source in a mixture; None: there is none. Documents of two sources share no row.
    """

    place: str
    tokens: np.ndarray
    trained: np.ndarray | None = None
    source: str | None = None


class _Piece(NamedTuple):
    document: int
    tokens: np.ndarray
    trained: np.ndarray | None


def new_counts() -> dict[str, int]:
    """The counts of a split, all 0.

    `tokens_in` are those of the documents, `tokens_out` those of the rows, and `tokens_lost` those of documents that
    were dropped: in = out + lost. `padding` are the positions without a token where all rows get the full length.
    """
    names = "documents documents_split documents_dropped tokens_in tokens_out tokens_lost rows padding"
    return dict.fromkeys(names.split(), 0)


def pack_documents(
    documents: Iterable[Document],
    *,
    length: int,
    overlong: str | None,
    packed: bool,
    counts: dict[str, int],
    window: int = WINDOW,
) -> Iterator[dict[str, Any]]:
    """The rows of the documents, in the order of their first documents.

    Args:
        documents: in their order.
        length: the most tokens of a row.
        overlong: what becomes of a longer document: "split" (pieces of `length` tokens, which do not see each other),
            "drop" or "refuse"; None: no policy was given, and the first one is refused.
        packed: share a row among documents; False: one piece in a row.
        counts: of `new_counts`; complete when the last row was given.
        window: tokens that are packed together.

    Yields:
        `input_ids` int32 ``[tokens]``, `lengths` int32 ``[pieces]``: their tokens, and `documents` int64
        ``[pieces]``: the numbers of the documents that they are of; `trained` bool ``[tokens]`` and `source`, a text,
        where documents have them.

    Raises:
        ConfigError: there is no such policy. DataError: a document is too long, and the policy does not allow it.
    """
    if overlong is not None:
        require_choice(overlong, POLICIES, field=FIELD)
    waiting: list[_Piece] = []
    held, source = 0, None
    for number, document in enumerate(documents):
        if document.source != source:
            yield from _rows(waiting, length, packed, counts, source)
            waiting, held, source = [], 0, document.source
        counts["documents"] += 1
        counts["tokens_in"] += len(document.tokens)
        for piece in _pieces(number, document, length, overlong, counts):
            waiting.append(piece)
            held += len(piece.tokens)
        if held >= window:
            yield from _rows(waiting, length, packed, counts, source)
            waiting, held = [], 0
    yield from _rows(waiting, length, packed, counts, source)


def best_fit_decreasing(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pieces that share a row: lists of their numbers, whose lengths add up to at most `size`.

    The longest piece goes first, and always into the fullest row that has room (D. S. Johnson, Near-optimal bin
    packing algorithms, 1973). Among equals the first one goes first, so equal lengths give equal rows.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room that is left -> the rows that have it
    rooms: list[int] = []  # ascending
    for piece in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect_left(rooms, lengths[piece])
        if place < len(rooms):
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        else:
            room, row = size, len(rows)
            rows.append([])
        rows[row].append(piece)
        left = room - lengths[piece]
        if left > 0:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(row)
    return rows


def _pieces(
    number: int, document: Document, length: int, overlong: str | None, counts: dict[str, int]
) -> Iterator[_Piece]:
    tokens = document.tokens
    if len(tokens) <= length:
        if len(tokens):
            yield _Piece(number, tokens, document.trained)
        return
    if overlong == "drop":
        counts["documents_dropped"] += 1
        counts["tokens_lost"] += len(tokens)
        return
    if overlong == "split":
        counts["documents_split"] += 1
        for part in (slice(start, start + length) for start in range(0, len(tokens), length)):
            yield _Piece(number, tokens[part], None if document.trained is None else document.trained[part])
        return
    said = "" if overlong is None else ", and the policy is to refuse it"
    what = f"{document.place}: the document has {len(tokens):,} tokens, and a row has {length:,}{said}."
    remedy = "Say what becomes of such documents: prepare.options.overlong=split (into pieces that do not see each "
    remedy += "other) or drop (its tokens are lost, and counted); or raise prepare.options.length."
    raise DataError(what, field=FIELD, value=overlong, remedy=remedy)


def _rows(
    waiting: Sequence[_Piece], length: int, packed: bool, counts: dict[str, int], source: str | None
) -> Iterator[dict[str, Any]]:
    lengths = [len(piece.tokens) for piece in waiting]
    shared = best_fit_decreasing(lengths, length) if packed else [[number] for number in range(len(waiting))]
    for members in sorted(map(sorted, shared)):
        tokens = np.concatenate([waiting[member].tokens for member in members])
        counts["rows"] += 1
        counts["tokens_out"] += len(tokens)
        counts["padding"] += length - len(tokens)
        trained = [part for member in members if (part := waiting[member].trained) is not None]
        yield {
            **({"trained": np.concatenate(trained)} if trained else {}),
            **({} if source is None else {SOURCE: source}),
            "input_ids": tokens.astype(np.int32),
            "lengths": np.array([lengths[member] for member in members], np.int32),
            "documents": np.array([waiting[member].document for member in members], np.int64),
        }
