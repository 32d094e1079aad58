"""A check on a few rows, through all stages, beside the results of a real run."""

from __future__ import annotations

from pathlib import Path

from flows.cli import presentation
from flows.plan import explain
from tests.support.runs import ALL, broken, ran, run, spec_of

# A generator that fails where a check has no business.
ENDLESS = """
    def numbered():
        for number, row in enumerate(points(10**9, 0)):
            assert number < 6, "read too far"
            yield row
    return {"train": numbered(), "test": points(16, 1)}
"""


def test_a_check_goes_through_every_stage_and_leaves_real_results_alone(folder: Path) -> None:
    before = {path for path in folder.rglob("*") if path.is_file()}
    result = run(folder, "limit=6", "publish.to=hf://nowhere/at-all")
    result.raise_for_error()
    assert ran(result) == ALL
    [data, model, *_] = (outcome.manifest or {} for outcome in result.stages)
    assert data["metrics"] == {"train_rows": 6, "test_rows": 6}
    assert model["meta"]["global_step"] == 4
    changed = {path for path in folder.rglob("*") if path.is_file()} - before
    limited = folder / "store" / "limited"
    assert all(path.is_relative_to(limited) or path.suffix == ".pyc" for path in changed)
    assert (limited / "hub" / "toy").is_dir()
    # Neither is a hit for the other, and each is one for itself.
    assert all(reason.hit for reason in explain(spec_of(folder)))
    assert ran(run(folder, "limit=6")) == set()
    assert not any(reason.hit for reason in explain(spec_of(folder, "limit=7")))
    [note, _] = presentation.check_note(result, 6)
    assert "a check on 6 rows of each split: it went through every stage" in note.plain


def test_a_check_reads_a_generator_no_further_than_its_rows(folder: Path) -> None:
    broken(folder, '    return {"train": points(rows, 0), "test": points(16, 1)}\n', ENDLESS)
    stages = ("evaluate.enabled=false", "predict.enabled=false", "publish.enabled=false", "tracking.enabled=false")
    run(folder, "limit=6", *stages, only="prepare-data").raise_for_error()
