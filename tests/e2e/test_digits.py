"""The first thing a newcomer runs."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

from tests.support.command import Cli, trainflow
from tests.support.repository import ROOT

SPEC = ROOT / "examples" / "digits" / "pipeline.yaml"


def test_digits_are_read_and_the_second_run_is_cached(tmp_path: Path, prefect_server: str, cli: Cli) -> None:
    arguments = ("run", SPEC, f"storage={tmp_path / 'storage'}", "train.args.num_train_epochs=8", "--json")
    # A newcomer's: nothing of Prefect's exists yet. On two processes: test_kill_resume.py.
    first = trainflow(*arguments, env={"PREFECT_HOME": str(tmp_path / "prefect")}).ok()
    stages = {stage["stage"]: stage for stage in json.loads(first.out)["stages"]}
    assert {stage["status"] for stage in stages.values()} == {"ran"}
    assert stages["evaluate"]["manifest"]["metrics"]["test"]["accuracy"] >= 0.97
    parts = sorted((tmp_path / "storage" / "stages" / "predict").rglob("*.parquet"))
    ids = [row_id for part in parts for row_id in pq.read_table(part)["row_id"].to_pylist()]
    assert len(ids) == len(set(ids)) == 359
    assert (tmp_path / "storage" / "hub" / "digits").is_dir()

    second = cli(*arguments).ok()
    assert {stage["status"] for stage in json.loads(second.out)["stages"]} == {"cached"}
