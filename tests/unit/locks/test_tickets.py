"""The tickets of launches: who may use a device, and who is next."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer_lib.errors import ConfigError
from trainer_lib.launch import LaunchConfig, base, gpu_selection
from trainer_lib.locks import tickets
from trainer_lib.locks.tickets import Place, Queue


def no() -> bool:
    return False


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with contextlib.closing(Queue()) as made:
        yield made


def test_a_launch_waits_for_each_of_its_devices_up_to_a_limit(queue: Queue) -> None:
    with (
        queue.draw(["GPU 0"], "a", no) as a,
        queue.draw(["GPU 1", "GPU 0"], "b", no) as b,
        queue.draw(["GPU 1"], "c", no) as c,
        queue.draw(["GPU 2"], "d", no) as d,
        queue.draw(["GPU 0"], "e", no) as e,
    ):
        assert queue.find_before(a, 1, no) == []
        assert [ticket.what for ticket in queue.find_before(b, 1, no)] == ["a"]
        assert [ticket.what for ticket in queue.find_before(c, 1, no)] == ["b"], "b asked first, for the same device"
        assert queue.find_before(d, 1, no) == []
        assert queue.find_before(a, 2, no) == queue.find_before(b, 2, no) == []
        assert [ticket.what for ticket in queue.find_before(e, 2, no)] == ["a", "b"]


@pytest.mark.parametrize("why", ["it is stopped while it waits", "a worker belongs to it"])
def test_a_launch_does_not_wait_for_every_other_one(why: str, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    with queue.draw(["GPU 0"], "a", no) as a, queue.draw(["GPU 0"], "b", no) as b:
        assert queue.find_before(b, 1, no)
        if why == "it is stopped while it waits":
            monkeypatch.setattr(tickets, "is_stopped", lambda pid: True)
        else:
            assert queue.find_before(a, 1, no) == []
            monkeypatch.setenv("TRAINFLOW_OWNER", f"{a.ticket.pid}:{a.ticket.started}")
        assert queue.find_before(b, 1, no) == []


def test_what_a_dead_launch_left_counts_for_nothing_and_is_removed(queue: Queue) -> None:
    with queue.draw(["GPU 0"], "a", no) as a:
        left = a.path.with_name("0-1-dead.json")
        left.write_text(json.dumps({**a.ticket.__dict__, "what": "dead", "waits": False}))
        a.path.with_name("0-2-torn.json").write_text("{")
        assert queue.find_before(a, 1, no) == []
        assert sorted(path.name for path in a.path.parent.iterdir()) == [a.path.name, "lock"]
    assert [path.name for path in a.path.parent.iterdir()] == ["lock"]


def test_a_process_that_inherited_the_ticket_keeps_the_device(queue: Queue) -> None:
    with queue.draw(["GPU 0"], "a", no) as a:
        assert queue.find_before(a, 1, no) == []
        inherited = os.dup(a.descriptor)
    with queue.draw(["GPU 0"], "b", no) as b:
        assert [ticket.what for ticket in queue.find_before(b, 1, no)] == ["a"]
        os.close(inherited)
        assert queue.find_before(b, 1, no) == []


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CUDA devices, as their files show them."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    for place, uuid in (("0000:07:00.0", "GPU-aa11"), ("0000:0a:00.0", "GPU-bb22")):
        (tmp_path / "driver" / place).mkdir(parents=True)
        (tmp_path / "driver" / place / "information").write_text(f"Model: \t X\nGPU UUID: \t {uuid}\n")
    monkeypatch.setattr(gpu_selection, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(gpu_selection, "DRIVER_FILES", tmp_path / "driver")
    monkeypatch.setattr(gpu_selection, "_torch_has_cuda", lambda: True)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "processes", "names"),
    [
        (None, 1, ("GPU 0",)),
        (None, 2, ("GPU 0", "GPU 1")),
        ("1", 1, ("GPU 1",)),
        ("GPU-bb", 1, ("GPU 1",)),
        ("GPU-cc", 1, ("GPU GPU-cc",)),
        ("MIG-77", 1, ("GPU MIG-77",)),
        ("", 1, ()),
    ],
)
def test_a_device_has_one_name(visible: str | None, processes: int, names: tuple[str, ...]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_selection.name_devices(environment, processes) == names


def held(
    events: list[dict[str, Any]], *, on_devices: bool = True, **config: Any
) -> contextlib.AbstractContextManager[Any]:
    settings = LaunchConfig(processes=1, **config)
    return base.held_devices(settings, on_devices=on_devices, what="train", on_event=events.append, should_cancel=no)


@pytest.mark.usefixtures("two_gpus", "queue")
def test_a_gpu_is_for_one_launch_unless_the_settings_say_otherwise() -> None:
    events: list[dict[str, Any]] = []
    with held(events, devices=(1,)) as files:
        assert len(files) == 1
        with (
            held(events, devices=(0,)) as others,
            held(events, devices=(1,), per_device=2),
            held(events, per_device="any"),
        ):
            assert len(others) == 1
        with held(events, on_devices=False) as none:
            assert none == (), "data is prepared beside a training"
    assert events == []


@pytest.mark.usefixtures("two_gpus")
def test_a_limit_that_cannot_be_kept_is_refused_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    events: list[dict[str, Any]] = []
    with (
        pytest.raises(ConfigError, match="It cannot be seen which launches use") as refused,
        held(events, per_device=1),
    ):
        pass
    assert refused.value.field == "train.launch.per_device"
    with held(events) as files:
        assert files == ()
    [warning] = events
    assert warning["event"] == "warning"
    assert warning["message"].endswith("This one starts beside them.")


def test_a_place_is_written_whole_when_it_grows_shorter(queue: Queue) -> None:
    with queue.draw(["GPU 0"], "a" * 500, no) as place:
        assert isinstance(place, Place)
        place.ticket = replace(place.ticket, what="b")
        place.write()
        assert json.loads(place.path.read_text())["what"] == "b"
