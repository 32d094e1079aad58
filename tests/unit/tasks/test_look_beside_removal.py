"""A stage that looks for its result waits for a removal that was announced, and forgets that of a dead process."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.stage.manifest import look_up_under
from tests.support.recorded import commit_stage, key_of
from trainer_lib.locks.lease import Holder
from trainer_lib.locks.removal import REMOVING, announce_removal, withdraw_removal
from trainer_lib.storage import Store


@pytest.mark.parametrize("goes", [True, False])
def test_a_look_waits_for_a_removal_that_was_announced(goes: bool, tmp_path: Path) -> None:
    storage, key = str(tmp_path), key_of("train", "toy 1")
    commit_stage(storage, "train", "toy 1")
    stage = Store.open(storage).child("stages", "train", key.folder)
    announce_removal(stage)

    def finish() -> None:
        if goes:
            stage.delete("COMMIT.json")
        withdraw_removal(stage)

    later = threading.Timer(0.3, finish)
    later.start()
    manifest, problem = look_up_under(storage, "train", key.digest)
    later.join()
    assert ((manifest is None), problem) == (goes, None)


def test_the_note_of_a_dead_process_holds_nobody_back(tmp_path: Path) -> None:
    storage, key = str(tmp_path), key_of("train", "toy 1")
    commit_stage(storage, "train", "toy 1")
    stage = Store.open(storage).child("stages", "train", key.folder)
    stage.write_bytes(REMOVING, replace(Holder.this_process(), pid=-1).to_bytes())
    assert look_up_under(storage, "train", key.digest)[0] is not None
    assert not stage.exists(REMOVING)
