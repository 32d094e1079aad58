"""New data under a URL of any store: what counts as a change, and what the note on the storage keeps."""

from __future__ import annotations

import os

import pytest

from flows.server.new_data import Watch
from flows.spec.spec import PipelineSpec
from trainer_lib.storage import Store


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what Prefect was asked to start, each once."""
    found: list[str] = []

    def start(watch: Watch, once: str) -> str:
        found.append(once)
        return "run"

    monkeypatch.setattr(Watch, "_start", start)
    return found


def test_what_comes_changes_or_goes_under_a_url_starts_one_run_each(any_url: str, started: list[str]) -> None:
    data = Store.open(any_url).child("data")
    spec = PipelineSpec(name="toy", recipe="recipe.py", storage=f"{any_url}/store")

    def watch() -> Watch:
        return Watch(data.url, "pipeline/toy", spec, lambda _: None)

    def has_started() -> bool:
        """Look as often as a change needs to settle; afterwards nothing is new."""
        first, second, third = (looking.look() for _ in range(3))
        assert (first, third) == (False, False)
        return second

    data.write_bytes("day/1.csv", b"1")
    looking = watch()
    assert not has_started(), "what is there at first"
    data.write_bytes("day/2.csv", b"1")
    assert has_started()
    data.write_bytes("day/2.csv", b"12")
    assert has_started(), "another size"
    knows_content = data.list()[0].tag is not None or data.is_local
    data.write_bytes("day/2.csv", b"21")
    if data.is_local:  # the clock of a disk may stand still for some milliseconds
        os.utime(data.local_path("day/2.csv"), (1, 1))
    assert has_started() is knows_content, "the same size"
    data.delete("day/1.csv")
    looking = watch()  # a restart
    assert has_started()
    looking = watch()
    assert not has_started(), "the note has what was seen before"
    assert len(set(started)) == len(started) == 3 + knows_content
