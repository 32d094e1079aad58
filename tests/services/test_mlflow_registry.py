"""Versions and aliases of a real registry: one version whatever is interrupted, and a champion that is better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.mlflow_store import fresh_store
from trainer_lib.errors import ConfigError
from trainer_lib.trackers.mlflow import mlflow_registry as registry
from trainer_lib.trackers.mlflow.mlflow_client import Clock, connect_timed
from trainer_lib.trackers.mlflow.mlflow_registry import Registration, Score

VALUES = tuple(0.80 + 0.001 * (n % 20) for n in range(200))


def score(shift: float = 0.0, *, rows: str = "a" * 64, metric: str = "test_accuracy") -> Score:
    resampled = tuple(value + shift for value in VALUES)
    return Score(metric=metric, value=0.81 + shift, rows=rows, is_greater_better=True, resampled=resampled)


@pytest.fixture
def client(tmp_path: Path) -> Any:
    return connect_timed(fresh_store(tmp_path / "store"), Clock())


def _register(client: Any, digest: str, measured: Score | None, **more: Any) -> tuple[str, registry.Verdict]:
    run_id = client.create_run("0").info.run_id
    model = client.create_logged_model("0", name="m", source_run_id=run_id)
    client.finalize_logged_model(model.model_id, "READY")
    asked = Registration(name="line", digest=digest, score=measured, description="A line.", **more)
    return registry.register(client, model.model_id, run_id, asked)


class _Dies:
    """A client whose process dies at one of its requests: before it is sent, or before its answer comes."""

    def __init__(self, client: Any, at: int, *, after: bool) -> None:
        self._client, self._left, self._after = client, at, after

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                raise KeyboardInterrupt
            result = target(*args, **kwargs)
            if self._left == 0:
                raise KeyboardInterrupt
            return result

        return call


def test_the_first_version_is_champion_a_better_one_replaces_it_and_another_does_not(client: Any) -> None:
    version, verdict = _register(client, "d1", score())
    assert (version, verdict.promoted, verdict.reason) == ("1", True, "It is the first champion.")
    version, verdict = _register(client, "d2", score(-0.01))
    assert (version, verdict.promoted) == ("2", False)
    assert verdict.difference == pytest.approx(-0.01)
    assert [registry.find_alias(client, "line", each) for each in ("champion", "candidate")] == ["1", "2"]
    version, verdict = _register(client, "d3", score(0.02))
    assert verdict.promoted
    assert [verdict.low, verdict.high] == pytest.approx([0.02, 0.02])
    assert verdict.resamples == 200
    assert "better than that of version 1" in verdict.reason
    assert registry.find_alias(client, "line", "champion") == "3"

    assert registry.roll_back(client, "line") == ("1", "3")
    # What people moved stays: the same run, delivered once more, decides nothing again.
    assert _register(client, "d3", score(0.02))[0] == "3"
    assert registry.find_alias(client, "line", "champion") == "1"
    with pytest.raises(ConfigError, match="is the first champion"):
        registry.roll_back(client, "line")
    with pytest.raises(ConfigError, match="No version of nothing"):
        registry.roll_back(client, "nothing")

    newest, *_ = registry.list_versions(client)
    assert (newest["version"], newest["aliases"], newest["description"]) == ("3", ["candidate"], "A line.")
    assert newest["score"]["value"] == pytest.approx(0.83)


def test_the_tags_of_a_version_stay_short_and_a_champion_whose_resamples_are_gone_is_kept(client: Any) -> None:
    _register(client, "d1", score())
    first = client.get_model_version("line", "1")
    assert max(len(value) for value in first.tags.values()) < 500
    [artifact] = client.list_artifacts(first.run_id, "registry")
    folder = Path(client.get_run(first.run_id).info.artifact_uri.removeprefix("file://"))
    (folder / artifact.path).unlink()
    _, verdict = _register(client, "d2", score(0.02))
    assert not verdict.promoted
    assert "resamples are not known" in verdict.reason


MIXED = tuple(value + (0.01 if n % 10 else -0.02) for n, value in enumerate(VALUES))


@pytest.mark.parametrize(
    ("first", "other", "reason"),
    [
        (score(), replace(score(0.002), resampled=MIXED), "not clearly better"),
        (score(), score(0.1, rows="b" * 64), "cannot be compared"),
        (score(), score(0.1, metric="test_loss"), "cannot be compared"),
        (None, None, "set register.metric"),
    ],
    ids=["within the noise", "other rows", "another metric", "no metric"],
)
def test_a_version_that_is_not_clearly_better_or_was_measured_otherwise_is_not_promoted(
    client: Any, first: Score | None, other: Score | None, reason: str
) -> None:
    assert _register(client, "d1", first)[1].promoted
    version, verdict = _register(client, "d2", other)
    assert not verdict.promoted
    if reason == "cannot be compared":
        with pytest.raises(ConfigError, match=reason) as refused:
            registry.promote(client, "line", version)
        assert "same rows" in str(refused.value.remedy)
    else:
        assert reason in verdict.reason
    assert registry.find_alias(client, "line", "champion") == "1"


def test_twenty_deaths_leave_one_version_and_one_champion(client: Any) -> None:
    _register(client, "old", score())
    run_id = client.create_run("0").info.run_id
    model = client.create_logged_model("0", name="m", source_run_id=run_id)
    client.finalize_logged_model(model.model_id, "READY")
    deaths, better = 0, 0.0
    for at in range(1, 12):
        for after in (False, True):
            better += 0.01
            asked = Registration(name="line", digest=f"{at} {after}", score=score(better))
            try:
                registry.register(_Dies(client, at, after=after), model.model_id, run_id, asked)
            except KeyboardInterrupt:
                deaths += 1
            # Nothing is half registered: whatever is there has its tags.
            for each in client.search_model_versions("name='line'"):
                assert {"trainflow.model_digest", "trainflow.score"} <= set(each.tags)
            version, verdict = registry.register(client, model.model_id, run_id, asked)
            assert verdict.promoted
            assert registry.find_alias(client, "line", "champion") == version
    assert deaths >= 20
    digests = [each["digest"] for each in registry.list_versions(client)]
    assert len(digests) == len(set(digests)) == 23
