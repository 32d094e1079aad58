"""Each part of a job is worked on by one process at a time, and by another one when that is gone."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.shared_parts import BLOCK, SharedParts
from trainer_lib.storage import Store


class _Finished:
    """Parts that were finished, with the worker that did each."""

    def __init__(self) -> None:
        self.by: dict[int, list[str]] = {}

    def list_finished(self, block: int) -> set[int]:
        return {part for part in self.by if part // BLOCK == block}

    def is_finished(self, part: int) -> bool:
        return part in self.by


def test_workers_share_the_parts_and_each_is_done_once(tmp_path: Path) -> None:
    finished = _Finished()

    def work(name: str) -> None:
        with SharedParts(Store.open(tmp_path), finished, total=40, poll_s=0.01) as shared:
            for part in shared:
                assert shared.is_ours(part)
                finished.by.setdefault(part, []).append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished.by) == list(range(40))
    assert all(len(names) == 1 for names in finished.by.values())
    assert len({name for names in finished.by.values() for name in names}) > 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # no claim, no sign of life


def test_the_end_may_be_found_while_others_hold_parts_beyond_it(tmp_path: Path) -> None:
    finished, seen = _Finished(), []
    with SharedParts(Store.open(tmp_path), finished) as shared:
        for part in shared:
            seen.append(part)
            if part == 3:
                shared.end_at(3)
            else:
                finished.by[part] = ["us"]
    assert seen == [0, 1, 2, 3]


def _claim(folder: Path, part: int, holder: Holder) -> None:
    path = folder / "claims" / "000000" / f"{part:08d}" / WRITING
    path.parent.mkdir(parents=True)
    path.write_bytes(holder.to_bytes())


def test_the_part_of_a_process_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    here = Holder.this_process(ttl_s=30.0)
    _claim(tmp_path, 1, replace(here, id="dead", started="1"))  # another process had this pid
    finished, seen = _Finished(), []
    with SharedParts(Store.open(tmp_path), finished, total=3) as shared:
        for part in shared:
            seen.append(part)
            finished.by[part] = ["us"]
    assert seen == [0, 1, 2]


def test_the_part_of_a_silent_machine_is_taken_over_once_its_beat_stood_still(tmp_path: Path) -> None:
    away = replace(Holder.this_process(ttl_s=0.3), id="away", machine="another/machine/1")
    _claim(tmp_path, 0, away)
    beat = tmp_path / "claims" / "away.beat"
    beat.write_text("0")
    stop = threading.Event()
    beats = 0

    def live() -> None:
        nonlocal beats
        while not stop.wait(0.05):
            beats += 1
            beat.write_text(str(beats))
            if beats == 10:
                return

    other = threading.Thread(target=live)
    other.start()
    finished, seen = _Finished(), []
    with SharedParts(Store.open(tmp_path), finished, total=2, poll_s=0.02) as shared:
        for part in shared:
            seen.append((part, beats))
            finished.by[part] = ["us"]
    stop.set()
    other.join()
    assert [part for part, _ in seen] == [1, 0]
    assert seen[1][1] == 10  # not before its last beat


def test_a_part_that_another_process_took_for_lost_is_not_ours_any_more(tmp_path: Path) -> None:
    finished = _Finished()
    with SharedParts(Store.open(tmp_path), finished, total=1) as slow:
        part = next(iter(slow))
        # As after a long pause: the other one has watched our beat stand still.
        claim = tmp_path / "claims" / "000000" / f"{part:08d}" / WRITING
        ours = Holder.from_bytes(claim.read_bytes())
        assert ours is not None and ours.pid == os.getpid()
        claim.write_bytes(replace(ours, id="other", started="1").to_bytes())
        assert not slow.is_ours(part)
    assert claim.exists()  # it is the other one's


def test_parts_of_several_blocks_are_listed_a_block_at_a_time(tmp_path: Path) -> None:
    finished, looked = _Finished(), []
    finished.by = {part: ["before"] for part in range(2 * BLOCK + 3) if part not in (5, BLOCK, 2 * BLOCK + 2)}
    list_block = finished.list_finished
    finished.list_finished = lambda block: looked.append(block) or list_block(block)  # type: ignore[method-assign, func-returns-value]
    away = replace(Holder.this_process(ttl_s=0.1), id="away", machine="another/machine/1")
    path = tmp_path / "claims" / "000001" / f"{BLOCK:08d}" / WRITING
    path.parent.mkdir(parents=True)
    path.write_bytes(away.to_bytes())
    seen = []
    with SharedParts(Store.open(tmp_path), finished, total=2 * BLOCK + 3, poll_s=0.02) as shared:
        for part in shared:
            seen.append(part)
            finished.by[part] = ["us"]
    assert seen == [5, 2 * BLOCK + 2, BLOCK]  # another machine's part once its worker is silent
    assert looked[:4] == [0, 1, 1, 2]  # again where a claim was met
    assert set(looked[4:]) == {1}  # and then only where others are at work
