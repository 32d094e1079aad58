"""Which launches a run announces before its first stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows.run_stages import _expect_launches
from trainer_lib.launch import LaunchConfig, warm

ONE, TWO = LaunchConfig(kind="process", processes=1), LaunchConfig(kind="torchrun", processes=2)


def plan(hits: set[str], wanted: set[str], force: frozenset[str] = frozenset()) -> Any:
    launches = {"prepare-data": ONE, "train": TWO, "evaluate": TWO, "push-to-hub": None}
    return SimpleNamespace(
        reasons={name: SimpleNamespace(hit=name in hits) for name in launches},
        stages={name: SimpleNamespace(launch=launch) for name, launch in launches.items()},
        is_wanted=lambda name: name in wanted,
        context=SimpleNamespace(force=force),
    )


@pytest.mark.parametrize(
    ("hits", "wanted", "force", "expected"),
    [
        (set(), {"prepare-data", "train", "evaluate", "push-to-hub"}, frozenset(), [ONE, TWO, TWO]),
        ({"prepare-data"}, {"prepare-data", "train"}, frozenset(), [TWO]),
        ({"prepare-data", "train"}, {"prepare-data", "train"}, frozenset({"train"}), [TWO]),
        ({"prepare-data", "train"}, {"prepare-data", "train"}, frozenset(), None),
    ],
)
def test_stages_that_will_run_are_announced(
    hits: set[str],
    wanted: set[str],
    force: frozenset[str],
    expected: list[LaunchConfig] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announced: list[Any] = []
    monkeypatch.setattr(warm, "expect", lambda launches: announced.append(list(launches)))
    _expect_launches(plan(hits, wanted, force))
    if expected is None:
        assert announced == []
    else:
        assert sorted(map(repr, announced[0])) == sorted(map(repr, expected))
