"""`save_model` and `_save` overrides run for checkpoints, and what they write is committed with the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.stores import record_fsync
from tests.support.toys import classification_rows
from tests.support.training import assert_equal, final_state, trainer
from trainer_lib import Trainer
from trainer_lib.checkpoint.catalogue import list_foreign, list_uncommitted
from trainer_lib.commit import COMMIT, read_commit, verify_files
from trainer_lib.errors import ConfigError
from trainer_lib.locks.claim import claim_folder
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store

ROWS = classification_rows(32)
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant"}


class Noting(Trainer):
    """Adds a file, as most overrides do, and draws random numbers while it saves."""

    folders: list[str]

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
    assert commit is not None
    assert verify_files(store, commit) == []
    assert len({entry.path for entry in commit.files}) == len(commit.files)
    return {entry.path for entry in commit.files}


@pytest.mark.parametrize("background", [False, True])
def test_files_that_an_override_adds_are_in_every_checkpoint(tmp_path: Path, background: bool) -> None:
    plain = trainer(tmp_path / "plain", ROWS, **SAVING)
    plain.train()
    one = trainer(tmp_path / "one", ROWS, cls=Noting, save_async=background, **SAVING)
    one.folders = []  # type: ignore[attr-defined]
    one.train()
    assert one.folders == [str(tmp_path / "one" / f"checkpoint-{step}") for step in (2, 4)]  # type: ignore[attr-defined]
    for step in (2, 4):
        found = _committed(tmp_path / "one" / f"checkpoint-{step}")
        assert found == _committed(tmp_path / "plain" / f"checkpoint-{step}") | {"head/notes.json"}
        notes = json.loads((tmp_path / "one" / f"checkpoint-{step}" / "head" / "notes.json").read_text())
        assert notes == {"step": step}
    assert_equal(final_state(one), final_state(plain))


def test_every_committed_file_is_fsynced_before_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = record_fsync(monkeypatch)
    one = trainer(tmp_path, ROWS, cls=Noting, **{**SAVING, "max_steps": 2})
    one.folders = []  # type: ignore[attr-defined]
    one.train()
    folder = tmp_path / "checkpoint-2"
    before = synced[: next(index for index, path in enumerate(synced) if COMMIT in Path(path).name)]
    assert {str(folder / path) for path in _committed(folder)} | {str(folder / "head")} <= set(before)


@pytest.mark.parametrize("cls", [Noting, Replacing, WithoutLoading, OfOld])
def test_a_resume_reads_what_an_override_wrote(tmp_path: Path, cls: Any) -> None:
    def build(folder: str, **given: Any) -> Trainer:
        one = trainer(tmp_path / folder, ROWS, cls=cls, **{**SAVING, **given})
        one.folders = []  # type: ignore[attr-defined]
        return one

    whole = build("whole")
    whole.train()
    stopped = build("stopped", max_steps=2)
    stopped.train()
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
    one = trainer("memory://own-saves/run", ROWS, cls=Noting, **SAVING)
    one.folders = []  # type: ignore[attr-defined]
    one.train()
    assert [Path(folder).name for folder in one.folders] == ["checkpoint-2", "checkpoint-4"]  # type: ignore[attr-defined]
    assert not any(Path(folder).exists() for folder in one.folders)  # type: ignore[attr-defined]
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
    resumed = trainer(tmp_path, ROWS, cls=Pickling, resume_from_checkpoint=True, **SAVING)
    resumed.train()
    assert "head.pt" in _committed(tmp_path / "checkpoint-4")


def test_an_override_of_save_is_given_a_folder_and_may_take_nothing_else(tmp_path: Path) -> None:
    folders: list[Any] = []

    class Oldest(Trainer):
        def _save(self, output_dir: str) -> None:  # type: ignore[override]
            folders.append(output_dir)
            super()._save(output_dir)

    one = trainer(tmp_path, ROWS, cls=Oldest, **{**SAVING, "max_steps": 2})
    one.train()
    one.save_model()
    assert folders == [str(tmp_path / "checkpoint-2"), str(tmp_path)]
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(folders[0] + "/model.safetensors").keys()


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
def test_a_link_that_an_override_leaves_is_refused_and_removed_and_its_target_stays(
    tmp_path: Path, name: str, target: str, remote: bool
) -> None:
    base = _base(tmp_path / "base")
    where: Any = f"memory://links-{name}" if remote else tmp_path / "run"
    one = trainer(where, ROWS, cls=Linking, **SAVING)
    one.links = {name: base / target}  # type: ignore[attr-defined]
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
    one = trainer(tmp_path / "run", ROWS, cls=OfOld, **SAVING)
    one.train()
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
