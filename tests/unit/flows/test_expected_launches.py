"""Which launches a run announces before its first stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows.run_stages import expect_launches
from trainer_lib.launch import LaunchConfig, warm

ONE, TWO = LaunchConfig(kind="process", processes=1), LaunchConfig(kind="torchrun", processes=2)


def plan(hits: set[str], wanted: set[str], force: frozenset[str] = frozenset()) -> Any:
    launches = {"prepare-data": ONE, "train": TWO, "evaluate": TWO, "push-to-hub": None}
    return SimpleNamespace(
        reasons={name: SimpleNamespace(hit=name in hits) for name in launches},
        stages={
            name: SimpleNamespace(launch=launch, stage=SimpleNamespace(name=name)) for name, launch in launches.items()
        },
        is_wanted=lambda name: name in wanted,
        context=SimpleNamespace(force=force),
    )


@pytest.mark.parametrize(
    ("hits", "wanted", "force", "expected"),
    [
        (
            set(),
            {"prepare-data", "train", "evaluate", "push-to-hub"},
            frozenset(),
            {"prepare-data": ONE, "train": TWO, "evaluate": TWO},
        ),
        ({"prepare-data"}, {"prepare-data", "train"}, frozenset(), {"train": TWO}),
        ({"prepare-data", "train"}, {"prepare-data", "train"}, frozenset({"train"}), {"train": TWO}),
        ({"prepare-data", "train"}, {"prepare-data", "train"}, frozenset(), None),
    ],
)
def test_stages_that_will_run_are_announced(
    hits: set[str],
    wanted: set[str],
    force: frozenset[str],
    expected: dict[str, LaunchConfig] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announced: list[Any] = []
    monkeypatch.setattr(warm, "expect", lambda launches: announced.append(launches))
    expect_launches(plan(hits, wanted, force))
    assert announced == ([] if expected is None else [expected])
