"""Where a Trainer saves: files of overrides are committed with the rest, and no earlier run loses a checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.stores import record_fsync
from tests.support.toys import Hungry, classification_rows
from tests.support.training import Note, StopAt, assert_equal, final_state, trained, trainer
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.checkpoint.catalogue import list_foreign, list_uncommitted, recognise_folder
from trainer_lib.errors import ConfigError, Preempted
from trainer_lib.locks.claim import claim_folder
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store
from trainer_lib.storage.commit import COMMIT, read_commit, verify_files

ROWS = classification_rows(24)  # 6 steps of 4 in an epoch
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}
STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
LIMITED: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}


class Noting(Trainer):
    """Adds a file, as most overrides do, and draws random numbers while it saves."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.folders: list[str] = []
        super().__init__(*given, **more)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call=_internal_call)
        assert output_dir is not None
        torch.rand(7)
        self.folders.append(output_dir)
        (Path(output_dir) / "head").mkdir()
        (Path(output_dir) / "head" / "notes.json").write_text(json.dumps({"step": self.state.global_step}))
        (Path(output_dir) / "training_args.json").write_text("{}")


class Replacing(Trainer):
    """Writes the model in a form of its own, under the usual name, and reads it back."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert output_dir is not None
        weights = {f"mine.{name}": value.clone() for name, value in self.model.state_dict().items()}
        save_file(weights, Path(output_dir) / "model.safetensors")
        (Path(output_dir) / "config.json").write_text('{"mine": true}')

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        found = load_file(Path(resume_from_checkpoint) / "model.safetensors")
        self.model.load_state_dict({name.removeprefix("mine."): value for name, value in found.items()})


class WithoutLoading(Replacing):
    _load_from_checkpoint = Trainer._load_from_checkpoint


class OfOld(Trainer):
    def save_model(self, output_dir: str | None = None) -> None:  # type: ignore[override]
        super().save_model(output_dir)
        Path(str(output_dir), "old.txt").write_text("old")


def _committed(folder: Path | str) -> set[str]:
    store = Store.open(str(folder))
    commit = read_commit(store)
    assert commit is not None and verify_files(store, commit) == []
    assert len({entry.path for entry in commit.files}) == len(commit.files)
    return {entry.path for entry in commit.files}


@pytest.mark.parametrize("background", [False, True])
def test_files_that_an_override_adds_are_in_every_checkpoint(tmp_path: Path, background: bool) -> None:
    plain = trained(tmp_path / "plain", ROWS, **SAVING)
    one: Any = trained(tmp_path / "one", ROWS, cls=Noting, save_async=background, **SAVING)
    assert one.folders == [str(tmp_path / "one" / f"checkpoint-{step}") for step in (2, 4)]
    for step in (2, 4):
        found = _committed(tmp_path / "one" / f"checkpoint-{step}")
        assert found == _committed(tmp_path / "plain" / f"checkpoint-{step}") | {"head/notes.json"}
        notes = json.loads((tmp_path / "one" / f"checkpoint-{step}" / "head" / "notes.json").read_text())
        assert notes == {"step": step}
    assert_equal(final_state(one), final_state(plain))


def test_every_committed_file_is_fsynced_before_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = record_fsync(monkeypatch)
    trainer(tmp_path, ROWS, cls=Noting, **{**SAVING, "max_steps": 2}).train()
    folder = tmp_path / "checkpoint-2"
    before = synced[: next(index for index, path in enumerate(synced) if COMMIT in Path(path).name)]
    assert {str(folder / path) for path in _committed(folder)} | {str(folder / "head")} <= set(before)


@pytest.mark.parametrize("cls", [Replacing, WithoutLoading, OfOld])
def test_a_resume_reads_what_an_override_wrote(tmp_path: Path, cls: Any) -> None:
    def build(folder: str, **given: Any) -> Trainer:
        return trainer(tmp_path / folder, ROWS, cls=cls, **{**SAVING, **given})

    whole = build("whole")
    whole.train()
    build("stopped", max_steps=2).train()
    resumed = build("stopped", resume_from_checkpoint=True)
    resumed.train()
    assert_equal(final_state(resumed), final_state(whole))


def test_a_model_in_another_form_stays_under_its_name_beside_the_weights_that_training_needs(tmp_path: Path) -> None:
    trainer(tmp_path, ROWS, cls=Replacing, **SAVING).train()
    folder = tmp_path / "checkpoint-4"
    assert {"model.safetensors", "trainflow/model.safetensors", "config.json"} <= _committed(folder)
    assert all(name.startswith("mine.") for name in load_file(folder / "model.safetensors"))
    assert json.loads((folder / "config.json").read_text()) == {"mine": True}


def test_a_remote_checkpoint_gets_the_files_of_a_local_folder_of_its_name() -> None:
    one: Any = trained("memory://own-saves/run", ROWS, cls=Noting, **SAVING)
    assert [Path(folder).name for folder in one.folders] == ["checkpoint-2", "checkpoint-4"]
    assert not any(Path(folder).exists() for folder in one.folders)
    assert "head/notes.json" in _committed("memory://own-saves/run/checkpoint-4")


class Pickling(Trainer):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        torch.save({"head": 1}, Path(str(output_dir)) / "head.pt")


def test_a_checkpoint_with_a_pickle_of_an_overrides_is_ours_committed_or_interrupted(tmp_path: Path) -> None:
    trainer(tmp_path, ROWS, cls=Pickling, **{**SAVING, "max_steps": 2}).train()
    root = Store.open(str(tmp_path))
    assert list_foreign(root) == []
    interrupted = tmp_path / "checkpoint-3"
    interrupted.mkdir()
    claim_folder(root.child("checkpoint-3"), Holder.this_process(), lambda other: False)
    (interrupted / "head.pt").write_bytes(b"half")
    assert (list_foreign(root), list_uncommitted(root)) == ([], ["checkpoint-3"])
    assert recognise_folder(root.child("checkpoint-3")) is None
    trained(tmp_path, ROWS, cls=Pickling, resume_from_checkpoint=True, **SAVING)
    assert "head.pt" in _committed(tmp_path / "checkpoint-4")


class Linking(Trainer):
    """Adds links to files and folders of the user's in place of copies."""

    links: dict[str, Path]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        for name, target in self.links.items():
            (Path(str(output_dir)) / name).symlink_to(target)


def _base(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("the base model's")
    return folder


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("trainer_state.json", "config.json"),  # a name that the save writes itself
        ("base.json", "config.json"),
        ("base", ""),
        ("absent", "nowhere"),
    ],
)
@pytest.mark.parametrize("remote", [False, True])
def test_a_link_of_an_override_is_refused(tmp_path: Path, name: str, target: str, remote: bool) -> None:
    base = _base(tmp_path / "base")
    where: Any = f"memory://links-{name}" if remote else tmp_path / "run"
    one: Any = trainer(where, ROWS, cls=Linking, **SAVING)
    one.links = {name: base / target}
    with pytest.raises(ConfigError, match="link") as caught:
        one.train()
    assert (caught.value.field, caught.value.value) == ("save_model", name)
    assert [path.name for path in base.iterdir()] == ["config.json"]
    assert (base / "config.json").read_text() == "the base model's"
    assert "checkpoint-2" not in Store.open(where).children()


def test_a_save_removes_the_links_that_an_interrupted_one_left(tmp_path: Path) -> None:
    base = _base(tmp_path / "base")
    left = tmp_path / "run" / "checkpoint-2"
    left.mkdir(parents=True)
    claim_folder(Store.open(left), Holder.this_process(), lambda other: False)
    (left / "trainer_state.json").symlink_to(base / "config.json")
    (left / "base").symlink_to(base)
    trained(tmp_path / "run", ROWS, cls=OfOld, **SAVING)
    assert "trainer_state.json" in _committed(left)
    assert not (left / "base").is_symlink()
    assert (base / "config.json").read_text() == "the base model's"


def test_a_save_that_an_override_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    class Failing(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            raise RuntimeError("no room for it")

    with pytest.raises(Exception, match="no room for it"):
        trainer(tmp_path, ROWS, cls=Failing, **SAVING).train()
    assert not (tmp_path / "checkpoint-2" / COMMIT).exists()
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    trainer(folder, ROWS, max_steps=3, **STEPS).train()
    return folder


@pytest.fixture
def earlier(first_run: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with the checkpoints of the steps 2 and 3 of an earlier run, which stay as they are."""

    def content() -> dict[str, bytes]:
        files = [path for step in (2, 3) for path in sorted((folder / f"checkpoint-{step}").rglob("*"))]
        return {str(path): path.read_bytes() for path in files if path.is_file()}

    folder = Path(shutil.copytree(first_run, tmp_path / "run"))
    before = content()
    yield folder
    assert content() == before


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("given", "new"),
    [
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "steps", "save_steps": 4}, [4, 8, 12]),
        ({"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}, [12]),
        ({"save_strategy": "epoch", "num_train_epochs": 2, "max_steps": -1}, [6, 12]),
    ],
)
def test_a_run_whose_checkpoints_are_all_newer_goes_on_and_spares_the_others(
    earlier: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], new: list[int]
) -> None:
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        trainer(earlier, ROWS, **{"max_steps": 12, **given}).train()
    assert "checkpoint-3 is the newest" in caplog.text
    assert _names(earlier) == sorted(f"checkpoint-{step}" for step in (2, 3, *new))


@pytest.mark.parametrize(
    "given",
    [
        {"save_strategy": "steps", "save_steps": 2},  # replaces checkpoint-2
        {"save_strategy": "steps", "save_steps": 1},
        {"save_strategy": "steps", "save_steps": 500, "max_steps": 3},  # replaces checkpoint-3, the last step's
        {"save_strategy": "steps", "save_steps": 500, "max_steps": 1},  # lies below checkpoint-3
        {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"},
    ],
)
def test_a_run_that_would_replace_or_hide_a_checkpoint_is_refused(earlier: Path, given: dict[str, Any]) -> None:
    one = trainer(earlier, ROWS, **{"max_steps": 12, "eval_dataset": ROWS[:4], **given})
    with pytest.raises(ConfigError, match="earlier run") as refused:
        one.train()
    assert (refused.value.field, one.state.global_step) == ("output_dir", 0)


def test_a_stop_below_an_earlier_checkpoint_is_not_saved(earlier: Path) -> None:
    given: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6}
    for step, said in ((2, "is not saved"), (1, "is not saved"), (5, "is committed")):
        with pytest.raises(Preempted, match=said):
            trainer(earlier, ROWS, callbacks=[StopAt(step)], **given).train()
        assert _names(earlier) == ["checkpoint-2", "checkpoint-3", *["checkpoint-5"] * (step == 5)]
    trainer(earlier, ROWS, **given).train(resume_from_checkpoint=True)
    assert _names(earlier) == ["checkpoint-12", "checkpoint-2", "checkpoint-3", "checkpoint-5", "checkpoint-6"]


def test_a_save_that_a_callback_asks_for_replaces_nothing(earlier: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Asking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = True

    saved = Note("on_save", lambda state, **_: state.global_step)
    trainer(earlier, ROWS, max_steps=5, save_strategy="no", callbacks=[Asking(), saved]).train()
    assert saved.kept == [4, 5] and "Step 2 is not saved" in caplog.text


@pytest.mark.parametrize(("step", "goes_on"), [(3, True), (4, False), (100, True)])
def test_another_programs_checkpoints_stay_and_are_only_then_in_the_way(
    tmp_path: Path, step: int, goes_on: bool
) -> None:
    theirs = tmp_path / f"checkpoint-{step}" / "optimizer.pt"
    theirs.parent.mkdir()
    theirs.write_bytes(b"weeks of work")
    one = trainer(tmp_path, ROWS, max_steps=4, **STEPS)
    if goes_on:
        one.train()
        assert {"checkpoint-2", "checkpoint-4"} < set(_names(tmp_path))
    else:
        for resume in (None, "auto", True):
            with pytest.raises(ConfigError, match="another program wrote") as refused:
                one.train(resume_from_checkpoint=resume)
            assert "import" in str(refused.value.remedy) if resume is True else refused.value.field == "output_dir"
        trained(tmp_path, ROWS, max_steps=4, save_strategy="no")
    assert theirs.read_bytes() == b"weeks of work"


def test_an_earlier_runs_checkpoints_stay_after_a_resume(earlier: Path) -> None:
    for step in (5, 7):  # the checkpoint of a resumed run names them too
        one = trainer(earlier, ROWS, resume_from_checkpoint=step > 5, callbacks=[StopAt(step)], **LIMITED)
        with pytest.raises(Preempted, match="is committed"):
            one.train()
        assert _names(earlier) == ["checkpoint-2", "checkpoint-3", f"checkpoint-{step}"]
    trainer(earlier, ROWS, resume_from_checkpoint=True, **LIMITED).train()
    assert _names(earlier) == ["checkpoint-12", "checkpoint-2", "checkpoint-3"]


def test_an_earlier_runs_checkpoints_stay_when_memory_runs_out(earlier: Path) -> None:
    one = trained(earlier, ROWS, model=Hungry(2, since=5), auto_find_batch_size=True, **LIMITED)
    assert one.state.train_batch_size == 2
    assert _names(earlier) == ["checkpoint-12", "checkpoint-2", "checkpoint-3"]
