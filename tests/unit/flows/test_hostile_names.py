"""Names that strangers chose (of metrics, runs, stages' reasons) steer no terminal, whichever command shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from flows.past_runs import write_record
from flows.server.api import quiet_environment
from tests.support.recorded import commit_stage, record_run
from trainer_lib.storage import Store

ODD = "\x1b]0;owned\x07<script>alert(1)</script>\u202ekcab\u200f\x9b2J\n✗ forged"
RUN, OTHER, BAD = "a" * 16, "b" * 16, "c" * 16


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    environ: dict[str, str] = {}
    quiet_environment(environ)  # as a command does for its own process
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    place = str(tmp_path / "store")
    for day, run_id in ((1, RUN), (2, OTHER)):
        keys = {name: commit_stage(place, name, f"{name} {day}") for name in ("prepare-data", "train")}
        fields: dict[str, Any] = {
            "name": f"toy {ODD}",
            "run_name": f"run {ODD} {'x' * 10_000}",
            "metrics": {f"test_{ODD}": day / 10, "m" * 10_000: 1.0, "test_odd": ODD},
            "worked_in": {ODD: ODD},
            "failed": ODD,
            "sweep": ODD,
            "trial": ODD,
            "run_url": f"https://example.org/{ODD}",
            "mlflow_run_id": ODD,
            "outcomes": {name: {"status": ODD, "seconds": 1.0, "reason": ODD} for name in ("train", ODD)},
            "planned": ["train", ODD],
            "sources": {ODD: ODD},
        }
        record_run(place, run_id, day=day, status="FAILED", stages=keys, **fields)
        Store.open(place).child("runs", run_id).write_bytes(f"tags/{'t' * 60}", b"{}")
    write_record(Store.open(place).child("runs", BAD), {"name": ODD, "started": ODD})
    Store.open(place).child("runs", BAD).write_bytes("run.json", b'{"\x1b]0;x\x07": 1, "\x1b]0;x\x07": 2}')
    return place


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        "runs",
        "status",
        f"show {RUN}",
        f"show {RUN} --all",
        f"compare {RUN} {OTHER}",
        f"logs {RUN}",
        f"lineage {RUN}",
        f"verify {RUN}",
        f"tag {RUN} best",
        f"show {BAD}",
        f"show {ODD}",
        f"resume {RUN}",
        f"reproduce {RUN}",
        f"tag {RUN} {ODD}",
        "gc",
        "gc --delete",
        "sync",
        "models",
        "checkpoints list",
        f"runs --sort {ODD}",
        f"runs --metric {ODD}>1",
    ],
)
def test_no_command_lets_a_name_steer_the_terminal(
    storage: str, command: str, as_json: bool, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = [word.replace("\0", ODD) for word in command.replace(ODD, "\0").split(" ")]
    words += ["--storage", storage] if words[0] != "checkpoints" else [storage]
    with pytest.raises(SystemExit) as ended:
        main([*words, *(["--json"] if as_json else [])])
        raise SystemExit(0)
    shown = capfd.readouterr()
    assert ended.value.code != 1, shown.err
    for text in (shown.out, shown.err, *(record.getMessage() for record in caplog.records)):
        lines = text.split("\n")
        assert not [line for line in lines if not line.replace("\t", "").isprintable()]
        assert not [line for line in lines if line.startswith("✗ forged")]
