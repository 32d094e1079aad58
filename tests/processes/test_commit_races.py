"""Of processes that commit or create at once, exactly one wins."""

from __future__ import annotations

import contextlib
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

from trainer_lib.commit import read_commit, write_commit
from trainer_lib.errors import LeaseLostError
from trainer_lib.storage import Store


def _commit_many(args: tuple[str, int]) -> list[int]:
    folder, number = args
    won = []
    for round_number in range(20):
        store = Store.open(folder).child(str(round_number))
        with contextlib.suppress(LeaseLostError):
            write_commit(store, "stage", [], {"by": number})
            won.append(round_number)
    return won


def test_of_processes_that_commit_at_once_exactly_one_wins(tmp_path: Path) -> None:
    with get_context("spawn").Pool(2) as pool:
        won = pool.map(_commit_many, [(str(tmp_path), number) for number in range(2)])
        pool.close()
        pool.join()
    assert sorted(won[0] + won[1]) == list(range(20))
    for number in range(2):
        for round_number in won[number]:
            commit = read_commit(Store.open(tmp_path / str(round_number)))
            assert commit is not None
            assert commit.meta == {"by": number}


def _create_many(args: tuple[str, int]) -> list[int]:
    folder, number = args
    store = Store.open(folder)
    return [round_number for round_number in range(50) if store.create(f"{round_number}.json", b"%d" % number)]


def test_of_processes_that_create_at_once_exactly_one_wins(tmp_path: Path) -> None:
    with get_context("spawn").Pool(3) as pool:
        won = pool.map(_create_many, [(str(tmp_path / "s"), number) for number in range(3)])
        pool.close()
        pool.join()
    assert sorted(chain.from_iterable(won)) == list(range(50))
    assert len(list((tmp_path / "s").iterdir())) == 50  # no drafts left
