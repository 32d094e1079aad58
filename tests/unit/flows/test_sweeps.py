"""A sweep before its first trial: the specs of its trials, what is refused, and what is said at work."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.sweeps import sweep_project
from trainer_lib.errors import ConfigError
from trainflow.flows.cli.commands import sweep
from trainflow.flows.planning.plan import Plan
from trainflow.flows.spec.spec import load_spec
from trainflow.flows.spec.sweep_settings import SweepSettings
from trainflow.flows.sweeps.trial_specs import check_sweep, identify, require_same, sweep_of, trial_spec

PRUNED = ("sweep.pruner=asha", "train.eval_split=test", "train.args.eval_strategy=epoch")


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
    ],
)
def test_what_train_reports_may_be_the_objective(path: Path, overrides: list[str], added: str) -> None:
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
