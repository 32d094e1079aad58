"""A checkpoint that is marked to be kept outlives every rotation, in whatever order marks and removals come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import save_untrained, steps
from trainer_lib.commit import COMMIT
from trainer_lib.locks.keeping import KEEP, keep_checkpoint
from trainer_lib.locks.readers import withdraw_if_unread
from trainer_lib.storage import Store


def test_a_removed_checkpoint_is_not_made_again_by_a_mark(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    assert not keep_checkpoint(root.child("checkpoint-1"), "the best")
    assert root.children() == []


def test_a_training_that_went_back_removes_also_what_is_kept(tmp_path: Path) -> None:
    root = Store.open(tmp_path)
    save_untrained(root, 1)
    keep_checkpoint(root.child("checkpoint-1"), "the best")
    assert not withdraw_if_unread(root.child("checkpoint-1"))
    assert withdraw_if_unread(root.child("checkpoint-1"), even_kept=True)


@pytest.mark.parametrize("at", ["before the commit is deleted", "after the commit is deleted"])
def test_a_mark_that_comes_during_the_removal_is_seen(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remover has looked for marks already; it looks again once the commit is gone, and puts the commit back."""
    root = Store.open(tmp_path)
    save_untrained(root, 1)
    folder = root.child("checkpoint-1")
    whole = folder.read_bytes(COMMIT)
    delete, marked = Store.delete, []

    def marking_delete(self: Store, rel: str) -> None:
        if rel == COMMIT and at.startswith("before"):
            marked.append(keep_checkpoint(self, "the best"))
        delete(self, rel)
        if rel == COMMIT and at.startswith("after"):
            # The marker had looked for the commit just before it was deleted.
            self.create(KEEP, b"{}")
            marked.append(True)

    monkeypatch.setattr(Store, "delete", marking_delete)
    assert not withdraw_if_unread(folder)
    assert marked == [True]
    assert folder.read_bytes(COMMIT) == whole


def test_a_mark_that_comes_too_late_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint goes between the marker's two looks: it is told that nothing is kept."""
    root = Store.open(tmp_path)
    save_untrained(root, 1)
    folder, create = root.child("checkpoint-1"), Store.create

    def late_create(self: Store, rel: str, data: bytes) -> Any:
        if rel == KEEP:
            assert withdraw_if_unread(Store.open(tmp_path / "checkpoint-1"))
        return create(self, rel, data)

    monkeypatch.setattr(Store, "create", late_create)
    assert not keep_checkpoint(folder, "the best")
    assert steps(root) == []
    assert KEEP not in folder.children()
