"""What `make test` leaves to `make slow` and `make nightly` is there, and the main job is not among it."""

from __future__ import annotations

from tests.conftest import _NIGHTLY, _QUICK, _SLOW, is_nightly, is_slow
from tests.support.repository import ROOT


def test_every_listed_file_and_room_exists() -> None:
    assert [name for name in (*_SLOW, *_QUICK) if not (ROOT / "tests" / name).exists()] == []
    assert [name for name in _QUICK if name.partition("/")[0] not in _SLOW] == []


def test_every_listed_pattern_names_a_file_and_one_of_its_tests() -> None:
    for pattern in _NIGHTLY:
        file, _, test = pattern.partition("::")
        text = (ROOT / "tests" / file).read_text("utf-8")
        function = test.partition("[")[0].strip("*")
        assert function in text, pattern


def test_patterns_fit_the_names_of_tests() -> None:
    assert is_nightly("e2e/test_howto.py::test_a_page_does_what_it_says[gpus]")
    assert not is_nightly("e2e/test_howto.py::test_a_page_does_what_it_says[csv]")


def test_the_main_job_is_tested_with_every_change() -> None:
    assert not is_slow("e2e/test_digits.py")
    assert is_slow("e2e/test_howto.py")
    assert not is_slow("unit/storage/test_store.py")
