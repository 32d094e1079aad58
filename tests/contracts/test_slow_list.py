"""What `make test` leaves to `make slow` is there, and the main job is not among it."""

from __future__ import annotations

from tests.conftest import _QUICK, _SLOW, is_slow
from tests.support.repository import ROOT


def test_every_listed_file_and_room_exists() -> None:
    assert [name for name in (*_SLOW, *_QUICK) if not (ROOT / "tests" / name).exists()] == []
    assert [name for name in _QUICK if name.partition("/")[0] not in _SLOW] == []


def test_the_main_job_is_tested_with_every_change() -> None:
    assert not is_slow("e2e/test_digits.py")
    assert is_slow("e2e/test_s3_pipeline.py")
    assert not is_slow("unit/storage/test_store.py")
