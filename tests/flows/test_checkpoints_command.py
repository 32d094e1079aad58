"""`trainflow checkpoints list | verify | prune | import` as its user meets it, on a disk and on S3."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.cli import inventory
from tests.support.checkpoints import save
from tests.support.command import Cli
from tests.support.imported import peer_run
from tests.support.tiny_models import llama, lm_rows
from trainer_lib.checkpoint.catalogue import list_checkpoints
from trainer_lib.errors import ConfigError
from trainer_lib.locks.claim import WRITING
from trainer_lib.locks.lease import Holder, acquire_lease
from trainer_lib.locks.readers import protect_from_removal
from trainer_lib.storage import Store


def told(cli: Cli, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `trainflow checkpoints` with ``--json``."""
    done = cli("checkpoints", *arguments, "--json")
    return done.code, json.loads(done.out)


def steps(answer: dict[str, Any], state: str = "good") -> list[int]:
    return [entry["step"] for entry in answer["checkpoints"] if entry["state"] == state]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 5, the second of which is the best."""
    for step in range(1, 6):
        state = {"global_step": step, "best_global_step": 2}
        save(Store.open(tmp_path / "run"), step, trainer_state=state)
    return tmp_path / "run"


def interrupted(root: Path, step: int, claim: bytes | None) -> Path:
    """A folder as a save leaves it that came to no end."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    if claim is not None:
        (folder / WRITING).write_bytes(claim)
    return folder


# --------------------------------------------------------------------------------------------------------------- list
def test_a_folder_is_told_state_by_state(root: Path, cli: Cli, tmp_path: Path) -> None:
    (root / "checkpoint-3" / "model.safetensors").unlink()
    (root / "checkpoint-4" / "COMMIT.json").write_text("{}")
    interrupted(root, 6, None)
    interrupted(root, 7, Holder.this_process().to_bytes())
    (root / "checkpoint-8").mkdir()
    (root / "checkpoint-8" / "optimizer.pt").write_bytes(b"")
    (root / "checkpoint-9").symlink_to(tmp_path)
    code, answer = told(cli, "list", root)
    assert code == 0
    states = {entry["step"]: entry["state"] for entry in answer["checkpoints"]}
    assert states == {9: "link", 8: "foreign", 7: "being written", 6: "uncommitted", 5: "good", 4: "damaged",
                      3: "damaged", 2: "good", 1: "good"}  # fmt: skip
    problems = {entry["step"]: " ".join(entry["problems"]) for entry in answer["checkpoints"]}
    assert "model.safetensors: missing" in problems[3]
    assert "COMMIT.json" in problems[4]
    assert f"process {os.getpid()}" in problems[7]
    assert "transformers Trainer" in problems[8]
    assert [entry["step"] for entry in answer["checkpoints"] if entry["best"]] == [2]

    lines = cli("checkpoints", "list", root).out.splitlines()
    assert lines[0].split() == ["step", "committed", "size", "state", "where"]
    assert "good, best" in next(line for line in lines if line.split()[0] == "2")


def test_one_that_is_being_read_says_so_and_stays(root: Path, cli: Cli) -> None:
    with protect_from_removal(Store.open(root / "checkpoint-1")):
        _, answer = told(cli, "list", root)
        assert [bool(entry["in_use"]) for entry in answer["checkpoints"]] == [False, False, False, False, True]
        _, answer = told(cli, "prune", root, "--keep", "1")
    assert [entry["step"] for entry in answer["removed"]] == [3, 4]


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(ConfigError, match="transformers Trainer") as caught:
        inventory.find(str(tmp_path))
    assert "import" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="No committed checkpoint is there"):
        inventory.find(str(tmp_path / "absent"))


def test_every_damaged_byte_is_found_by_verify_which_shows_how_far_it_is(
    root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = told(cli, "list", root)
    assert told(cli, "verify", root)[0] == 0
    progress = []
    for option in ("", "", "--quiet", "--json"):
        progress.append(cli("checkpoints", "verify", root, *filter(None, [option])).err)
        monkeypatch.setattr(Console, "is_terminal", property(lambda self: self.stderr))
        monkeypatch.setenv("TERM", "xterm")
    total = sum(entry["bytes"] for entry in whole["checkpoints"]) / 1000
    assert [progress[0], *progress[2:]] == ["", "", ""], "nothing is drawn without a terminal, or unasked"
    assert all(part in progress[1] for part in ("reading", f"{total:.1f}/{total:.1f} kB", "0:00:00"))
    file = root / "checkpoint-2" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, answer = told(cli, "verify", root)
    assert code == 16
    [(url, problems)] = [(url, found) for url, found in answer["checkpoints"].items() if found]
    assert url.endswith("checkpoint-2")
    assert problems[0].startswith("optimizer.safetensors: digest")
    assert told(cli, "verify", root / "checkpoint-1")[0] == 0


# -------------------------------------------------------------------------------------------------------------- prune
def test_pruning_keeps_the_best_the_newest_and_what_somebody_owns(root: Path, cli: Cli) -> None:
    left = interrupted(root, 6, None)
    gone = interrupted(root, 7, Holder.this_process().to_bytes().replace(str(os.getpid()).encode(), b"4194305"))
    written = interrupted(root, 8, Holder.this_process().to_bytes())
    far = interrupted(root, 9, Holder("a", "elsewhere/boot/1", 5, "1", "2026-01-01", 0.0).to_bytes())
    foreign = interrupted(root, 10, None)
    (foreign / "optimizer.pt").write_bytes(b"")
    code, dry = told(cli, "prune", root, "--keep", "2", "--dry-run")
    assert code == 0
    assert [entry["step"] for entry in dry["removed"]] == [1, 3, 4, 7, 6]
    assert dry["bytes"] == sum(entry["bytes"] for entry in dry["removed"]) > 200
    assert len(list_checkpoints(Store.open(root))) == 5, "a dry run removed something"

    code, answer = told(cli, "prune", root, "--keep", "2")
    assert answer["removed"] == dry["removed"]
    assert [info.step for info in list_checkpoints(Store.open(root))] == [5, 2]
    assert [path.exists() for path in (left, gone, written, far, foreign)] == [False, False, True, True, True]
    assert told(cli, "prune", root, "--keep", "2")[1]["removed"] == []


def test_the_newest_good_one_is_told_by_its_bytes(root: Path, cli: Cli) -> None:
    for step in (4, 5):
        file = root / f"checkpoint-{step}" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
    _, answer = told(cli, "prune", root, "--keep", "1")
    assert 3 not in [entry["step"] for entry in answer["removed"]]
    assert (root / "checkpoint-3" / "COMMIT.json").exists()


def test_leftovers_of_a_folder_that_a_run_holds_stay(tmp_path: Path, cli: Cli) -> None:
    root = tmp_path / "stage" / "checkpoints"
    save(Store.open(root), 1)
    left = interrupted(root, 2, None)
    lease = acquire_lease(Store.open(tmp_path / "stage"))
    assert lease is not None
    with lease:
        assert told(cli, "prune", tmp_path / "stage", "--keep", "1")[1]["removed"] == []
        assert left.exists()
    assert len(told(cli, "prune", tmp_path / "stage", "--keep", "1")[1]["removed"]) == 1
    assert not left.exists()


# ----------------------------------------------------------------------------------------------------------------- S3
def test_listing_verifying_and_pruning_work_on_s3(s3_url: str, cli: Cli) -> None:
    url = f"{s3_url}/run"
    for step in (1, 2, 3):
        save(Store.open(url), step)
    assert steps(told(cli, "list", url)[1]) == [3, 2, 1]
    assert told(cli, "verify", url)[0] == 0
    assert [each["step"] for each in told(cli, "prune", url, "--keep", "1")[1]["removed"]] == [1, 2]
    assert steps(told(cli, "list", url)[1]) == [3]


# ------------------------------------------------------------------------------------------------------------- import
def test_a_checkpoint_of_transformers_is_imported(tmp_path: Path, cli: Cli) -> None:
    peer_run(tmp_path / "peer", llama(), lm_rows(8), max_steps=2, save_steps=2)
    done = cli("checkpoints", "import", tmp_path / "peer" / "checkpoint-2", tmp_path / "run")
    assert done.code == 0, done.err
    assert "imported  step 2, 21 parameters" in done.out
    assert "left out  training_args.bin" in done.out
    assert "resume_from_checkpoint=True" in done.out
    assert [info.step for info in list_checkpoints(Store.open(tmp_path / "run"))] == [2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("absent out", "There is no checkpoint"),
        ("nope://x out", "Unknown URL scheme"),
        ("s3://user:secret@bucket/x out", "must not carry credentials"),
        (". out --model train.py", "not of the form FILE.py:FUNCTION"),
        (". out --model absent.py:build", "This file does not exist"),
    ],
)
def test_a_bad_import_is_refused_with_a_remedy(words: str, expected: str, cli: Cli) -> None:
    done = cli("checkpoints", "import", *words.split())
    assert done.code == 2
    assert expected in done.err
    assert "  do " in done.err
    assert "secret" not in done.err
    assert not Path("out").exists()
