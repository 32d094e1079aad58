"""A sweep: specs of its trials, what is refused and said, and the ledger in which processes claim trials."""

from __future__ import annotations

import io
import math
import shutil
import sqlite3
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.sweeps import sweep_project
from trainer_lib.errors import ConfigError, DamagedError, StorageError
from trainflow.flows.cli.commands import sweep
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.spec import load_spec
from trainflow.flows.spec.sweep_settings import SweepSettings
from trainflow.flows.sweeps.ledger import DATABASE, Claim, Ledger
from trainflow.flows.sweeps.trial_specs import check_sweep, identify, require_same, sweep_of, trial_spec

PRUNED = ("sweep.pruner=asha", "train.eval_split=test", "train.args.eval_strategy=epoch")
RATE, WIDTH = "train.args.learning_rate", "train.model.width"
RATES = {RATE: {"low": 1e-4, "high": 1e-1, "log": True}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return sweep_project(tmp_path)


def test_a_trial_differs_in_its_values_and_shares_the_rest(path: Path) -> None:
    spec = load_spec(path, ("register.name=toy", "register.metric=test_error", "evaluate.require={test_error: '< 1'}"))
    check_sweep(spec)
    with pytest.raises(ConfigError, match=r"docs/sweeps\.md"):
        sweep_of(load_spec(path, ("sweep=",)))
    one = trial_spec(spec, {"train.args.learning_rate": 0.5}, {"trainflow.trial": "3"})
    assert one.train.args["learning_rate"] == 0.5
    assert one.tracking.tags["trainflow.trial"] == "3"
    assert (one.sweep, one.publish.enabled, one.predict.enabled, one.evaluate.require) == (None, False, False, {})
    assert trial_spec(spec, {}, {"trainflow.objective": "test_error train_loss"}).counted_on == {
        "sweep.objective.test_error": "test_error"
    }
    keys = [Plan.of(each).early_keys for each in (one, trial_spec(spec, {}, {}), spec)]
    assert keys[0]["prepare-data"] == keys[1]["prepare-data"]
    assert keys[0]["train"] != keys[1]["train"]
    # What the best spec finds committed: the same result, although a trial registers and publishes nothing.
    assert {name: keys[1][name] for name in keys[1]} == {name: keys[2][name] for name in keys[1]}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sweep.space={train.args.learning_rat: [1, 2]}"], 'Did you mean "learning_rate"?'),
        (["sweep.space={train.args.learning_rate: [0.1, -1]}"], "at least 0"),
        (["sweep.space={train.args.max_steps: {low: 1.5, high: 2.5}}"], "not a whole number"),
        (["sweep.space={trian.args.seed: [1, 2]}"], "Did you mean 'train.args.seed'?"),
        (["sweep.space={train.launch.processes: [1, 2]}"], "trials would be equal"),
        (["sweep.space={storage: [a, b]}"], "trials would be equal"),
        (["sweep.space={prepare.options.rosw: [1, 2]}"], "Did you mean 'rows'?"),
        (["sweep.objective=test_eror"], 'Did you mean "test_error"?'),
        (["sweep.objective=test_error_low"], "No evaluation reports this metric."),
        (["sweep.objective=tset_error"], "Did you mean 'test_error'?"),
        (["sweep.objective=eval_error"], "evaluations while training"),
        (["sweep.objective=train_los"], 'Did you mean "train_loss"?'),
        (["evaluate.enabled=false", "publish.enabled=false"], "leaves evaluate out"),
        (["sweep.pruner=asha"], "train.args.eval_strategy"),
        ([*PRUNED, "sweep.pruner={kind: asha, metric: eval_eror}"], 'Did you mean "eval_error"?'),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_trial(path: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sweep(load_spec(path, overrides))
    assert expected in str(caught.value)
    assert "sweep" in str(caught.value.field)


@pytest.mark.parametrize(
    ("overrides", "added"),
    [
        (PRUNED, ""),  # pruning takes the objective while training
        (["sweep.objective=train_runtime"], ""),
        # A split of this name is evaluated like any other.
        (["sweep.objective=train_los", "evaluate.splits=[train]"], ""),
        # What these report is known only when they run.
        (["sweep.objective=train_smoothness"], ""),
        (["sweep.objective=train_los"], "class Trainer(trainer_lib.Trainer):\n    pass\n"),
        (["sweep.objective=train_los"], "def callbacks(options):\n    return []\n"),
        ([*PRUNED[1:], "sweep.objective=eval_eror"], "def callbacks(options):\n    return []\n"),
        (["sweep.objective=test_error_low", "evaluate.confidence=0.9"], ""),
        (["sweep.objective=test_error/kind/a", "evaluate.slices=[kind]"], ""),
    ],
)
def test_what_a_run_may_report_may_be_the_objective(path: Path, overrides: list[str], added: str) -> None:
    recipe = path.parent / "recipe.py"
    recipe.write_text(f"import trainer_lib\n{recipe.read_text('utf-8')}\n\n{added}", "utf-8")
    check_sweep(load_spec(path, overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("sweep.seed=3",), "seed was 0"),
        (("sweep.direction=maximize",), 'direction was ["minimize"]'),
        (("sweep.space={train.args.seed: [1, 2]}",), "space.train.args.seed was"),
        (("train.args.max_steps=9",), "args.max_steps: 8 -> 9"),
    ],
)
def test_a_study_of_another_spec_is_refused(path: Path, overrides: tuple[str, ...], expected: str) -> None:
    known = identify(load_spec(path))
    with pytest.raises(ConfigError) as caught:
        require_same(load_spec(path, overrides), known)
    assert expected in str(caught.value)
    assert "another name" in str(caught.value.remedy)
    # More trials or slots are the same study.
    require_same(load_spec(path, ("sweep.trials=40", "sweep.parallel=2", "tracking.enabled=true")), known)


def test_how_long_the_other_trials_will_take_is_told_once_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("trainflow.flows.cli.commands.sweep.time.monotonic", lambda: now[0])
    settings = SweepSettings.model_validate(
        {"space": {"train.args.seed": [0, 1, 2]}, "objective": "eval_loss", "direction": "minimize", "trials": 20}
    )
    display = sweep.SweepDisplay(Console(file=io.StringIO()), settings, quiet=True)
    display({"event": "planned", "missing": 3})  # 17 had ended when the command began
    display({"event": "began", "trial": 17, "values": {"train.args.seed": 0}})
    assert "left" not in display.work()
    now[0] += 90
    display({"event": "ended", "trial": 17, "state": "complete", "objective": [0.5]})
    display({"event": "began", "trial": 18, "values": {"train.args.seed": 1}})
    assert display.work() == "1 ended in 1 min 30 s, 3 min 0 s left; trial 18 begins"
    for trial in (18, 19):
        display({"event": "ended", "trial": trial, "state": "pruned", "reason": "worse than others"})
    assert "left" not in display.work()


# -- the ledger: who claims which trial, with which values, and what an interrupted one becomes ------------------------


def design(**changes: Any) -> SweepSettings:
    """A sweep of three trials of two fields, unless `changes` say otherwise."""
    usual = {"space": {**RATES, WIDTH: [16, 32, 64]}, "objective": "loss", "direction": "minimize", "trials": 3}
    return SweepSettings.model_validate({**usual, **changes})


class Opened(list[Ledger]):
    """Ledgers and claims of one test."""

    def __init__(self) -> None:
        super().__init__()
        self.claims: list[Claim] = []

    def claim(self, of: Ledger) -> Claim:
        found = of.claim()
        assert found is not None
        self.claims.append(found)
        return found


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    for claim in opened.claims:
        claim.release()
    for each in opened:
        each.close()


def ledger(opened: Opened, folder: Path, **changes: Any) -> Ledger:
    opened.append(Ledger(folder, design(**changes)))
    return opened[-1]


def work(of: Ledger, objective: Callable[[dict[str, Any]], float], trials: int = 999) -> list[dict[str, Any]]:
    """The values of the trials that are claimed and completed in turn."""
    values: list[dict[str, Any]] = []
    while len(values) < trials and (claim := of.claim()) is not None:
        claim.complete([objective(claim.values)])
        claim.release()
        values.append(claim.values)
    return values


def test_trials_are_claimed_once_by_two_processes_and_end(opened: Opened, tmp_path: Path) -> None:
    ours, theirs = ledger(opened, tmp_path), ledger(opened, tmp_path)
    claims = [opened.claim(ours), opened.claim(theirs), opened.claim(ours)]
    assert [claim.number for claim in claims] == [0, 1, 2]
    assert theirs.claim() is None, "every trial is at work"
    for value, claim in zip((0.3, 0.1, 0.2), claims, strict=True):
        claim.complete([value])
        claim.release()
    assert ours.claim() is None
    assert theirs.is_done()
    assert theirs.best() == [1]
    assert [trial.objective for trial in ours.trials()] == [(0.3,), (0.1,), (0.2,)]


def test_an_interrupted_trial_is_claimed_again_with_its_values(opened: Opened, tmp_path: Path) -> None:
    first = opened.claim(ledger(opened, tmp_path))
    first.note(seconds=4.0)
    first.release()  # as the kernel does when the process is killed

    again = opened.claim(ledger(opened, tmp_path))
    assert (again.number, again.values, again.is_resumed) == (0, first.values, True)
    assert again.seconds_before == 4.0
    assert opened.claim(opened[-1]).number == 1, "it is at work again"


def test_values_follow_from_the_seed_and_lie_near_what_did_well_in_the_trials_before(
    opened: Opened, tmp_path: Path
) -> None:
    def off(values: dict[str, Any]) -> float:
        """How far off the best rate, 0.001, a trial is, in powers of ten."""
        return abs(math.log10(values[RATE]) + 3)

    def worked(folder: str, *parts: int, seed: int = 0) -> list[float]:
        tried: list[dict[str, Any]] = []
        for trials in parts:  # the command stops in between
            of = ledger(opened, tmp_path / folder, trials=30, seed=seed)
            tried += work(of, lambda values: off(values) + (values[WIDTH] != 32), trials)
        assert all(1e-4 <= values[RATE] <= 1e-1 for values in tried)
        return list(map(off, tried))

    whole = worked("whole", 24)
    assert statistics.mean(whole[10:]) < 0.5 * statistics.mean(whole[:10]), "the first ten are spread out"
    assert worked("stopped", 5, 5, 2) == whole[:12]
    assert worked("another seed", 3, seed=1) != whole[:3]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_no_point_of_a_small_space_is_tried_twice(opened: Opened, tmp_path: Path, sampler: str) -> None:
    dimensions: list[tuple[Any, list[Any]]] = [
        ([1, [2], None], [1, [2], None]),
        ({"low": 1, "high": 3}, [1, 2, 3]),
        ({"low": 1, "high": 3, "log": True}, [1, 2, 3]),
        ({"low": 0.1, "high": 0.3, "step": 0.1}, [0.1, 0.2, 0.3]),
    ]
    for number, (dimension, points) in enumerate(dimensions):
        of = ledger(opened, tmp_path / str(number), space={"a": dimension}, sampler=sampler, trials=9)
        tried = [values["a"] for values in work(of, lambda values: 1.0)]
        assert sorted(map(str, tried)) == sorted(map(str, points))
        assert of.is_done()


def test_a_grid_takes_every_point_once(opened: Opened, tmp_path: Path) -> None:
    space = {"a": [[1], {"b": 2}], "c": {"low": 0, "high": 1, "step": 0.5}}
    of = ledger(opened, tmp_path, space=space, sampler="grid", trials=None)
    points = []
    while (claim := of.claim()) is not None:
        points.append(claim.values)
        claim.end("failed", "It cannot be trained.")
        claim.release()
    assert points == [{"a": a, "c": c} for a in ([1], {"b": 2}) for c in (0, 0.5, 1)]
    assert of.best() == []
    assert {(trial.state, trial.notes["reason"]) for trial in of.trials()} == {("failed", "It cannot be trained.")}


def test_successive_halving_ends_what_is_behind(opened: Opened, tmp_path: Path) -> None:
    of = ledger(opened, tmp_path, trials=4, pruner={"kind": "asha", "factor": 2})
    leader = opened.claim(of)
    assert not any(leader.report(10 * evaluation, 0.1) for evaluation in (1, 2, 3))
    leader.complete([0.1])
    behind = opened.claim(of)
    assert behind.report(7, 0.9), "its first evaluation, whatever the step"
    behind.end("pruned", "Others were better.")
    assert [trial.state for trial in of.trials()] == ["complete", "pruned"]
    assert of.study.trials[0].intermediate_values == {1: 0.1, 2: 0.1, 3: 0.1}


def test_the_median_ends_who_is_worse_than_half_of_those_that_are_complete(opened: Opened, tmp_path: Path) -> None:
    of = ledger(opened, tmp_path, trials=9, pruner={"kind": "median", "startup": 3, "after": 2})
    for value in (0.1, 0.5, 0.9):
        complete = opened.claim(of)
        assert not any(complete.report(10 * evaluation, value) for evaluation in (1, 2, 3)), "of too few"
        complete.complete([value])
    better, worse = opened.claim(of), opened.claim(of)
    assert not any(better.report(10 * evaluation, 0.4) for evaluation in (1, 2, 3))
    assert not worse.report(10, 0.6), "the first evaluation is before `after`"
    assert worse.report(20, 0.6)


def test_a_training_that_goes_on_may_report_an_evaluation_again(opened: Opened, tmp_path: Path) -> None:
    claim = opened.claim(ledger(opened, tmp_path))
    claim.report(10, 0.5)
    claim.report(20, 0.4)
    claim.report(10, 0.6)
    claim.report(30, 0.3)
    assert opened[-1].study.trials[0].intermediate_values == {1: 0.5, 2: 0.4, 3: 0.3}


def test_several_objectives_have_several_best(opened: Opened, tmp_path: Path) -> None:
    of = ledger(opened, tmp_path, objective=["loss", "size"], direction=["minimize", "maximize"])
    for values in ([1.0, 1.0], [2.0, 2.0], [3.0, 1.5]):
        opened.claim(of).complete(values)
    assert of.best() == [0, 1]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a sweep of one axis with two trials that have ended."""
    folder = tmp_path_factory.mktemp("ended")
    first = Ledger(folder, design(space=RATES))
    for value in (0.5, 1e-300):
        claim = first.claim()
        assert claim is not None
        claim.report(10, 0.7)
        claim.note(seconds=1.5)
        claim.complete([value])
        claim.release()
    assert (first.best(), len(first.trials())) == ([1], 2)
    first.close()
    return folder / DATABASE


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE trial_values SET value = value - 0.001",
        "UPDATE trial_params SET param_value = param_value * 1.5",
        "UPDATE trial_intermediate_values SET intermediate_value = 0.01",
        "UPDATE trial_user_attributes SET value_json = '{\"run\": \"a\"}' WHERE key = 'trainflow:notes'",
        "UPDATE trial_user_attributes SET value_json = '\"0\"' WHERE key = 'trainflow:seal'",
    ],
)
def test_a_trial_whose_values_were_changed_after_its_end_is_named_and_decides_nothing(
    opened: Opened, ended: Path, tmp_path: Path, change: str
) -> None:
    shutil.copy(ended, tmp_path)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database, database:
        assert database.execute(f"{change}{' AND' if 'WHERE' in change else ' WHERE'} trial_id = 2").rowcount == 1
    last = ledger(opened, tmp_path, space=RATES)
    for decide in (last.best, last.trials, last.claim):
        with pytest.raises(DamagedError, match="values of trial 1 were changed"):
            decide()


def test_a_file_that_is_not_a_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_text("not a database, and long enough to be looked at as one" * 20)
    with pytest.raises(ConfigError, match=r"cannot be opened.*not a database"):
        Ledger(tmp_path, design())


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_ledger_that_is_lost_while_a_sweep_is_at_work_is_named(opened: Opened, tmp_path: Path, harm: str) -> None:
    at_work = ledger(opened, tmp_path)
    claim = opened.claim(at_work)
    if harm == "gone":
        (tmp_path / DATABASE).rename(tmp_path / "lost")
    else:
        (tmp_path / DATABASE).write_text("another file" * 1000)
    for use in (at_work.claim, lambda: claim.complete([0.5]), at_work.trials):
        with pytest.raises(StorageError, match="The sweep's ledger cannot be read or written: ") as caught:
            use()
        assert "no training that is committed is repeated" in (caught.value.remedy or "")
