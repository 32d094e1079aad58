"""The Trainer's Hub methods against a server that speaks the Hub's protocol, and against a folder."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load

from tests.support.hub_server import HubServer, Repo
from tests.support.toys import Classifier, classification_rows
from tests.support.training import StopAt, assert_equal, final_state, preempted_at, trainer
from trainer_lib import Trainer, TrainerCallback
from trainer_lib.base.yaml_text import parse_yaml
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.hub.folder import FolderHub

ROWS = classification_rows(12)
EACH_STEP: dict[str, Any] = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}


@pytest.fixture
def hub(hub_server: HubServer) -> HubServer:
    """Without a token in the environment: the arguments have it."""
    return hub_server


def summaries(hub: HubServer, repo: str = "org/toy") -> list[str]:
    return [commit.summary for commit in hub.repos[repo].commits[1:]]


def newest(hub: HubServer, repo: str = "org/toy") -> dict[str, bytes]:
    return {path: blob.data for path, blob in hub.repos[repo].commits[-1].files.items()}


def head(readme: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = parse_yaml(readme.decode().split("---\n")[1])
    return parsed


class Waiting(TrainerCallback):
    """Waits at each step for the push before it: on a slow machine, too, every save finds the Hub free."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.trainer: Trainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.trainer._trainflow.publisher.queue.wait(unless=lambda: False, poll_s=0.01)

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started.append(state.global_step)


def pushing(folder: Path, hub: HubServer, **given: Any) -> tuple[Any, Waiting]:
    waiting = Waiting()
    settings = {"hub_model_id": "org/toy", "hub_token": hub.token, **EACH_STEP, **given}
    one = trainer(folder, ROWS, callbacks=[waiting, *settings.pop("callbacks", [])], **settings)
    waiting.trainer = one
    return one, waiting


# --------------------------------------------------------------------------------------------------------- push_to_hub
def test_push_to_hub_publishes_model_card_and_arguments_and_returns_the_url(hub: HubServer, tmp_path: Path) -> None:
    one = trainer(tmp_path / "out", ROWS, hub_model_id="org/toy", hub_token=hub.token, max_steps=1)
    one.train()
    url = one.push_to_hub("Second thoughts", model_name="Toy", tags="tiny", license="mit")
    assert url == f"{hub.endpoint}/org/toy/tree/{hub.repos['org/toy'].branches['main']}"
    assert summaries(hub) == ["Second thoughts"]
    files = newest(hub)
    assert {"README.md", "model.safetensors", "training_args.json"} <= files.keys()
    assert torch.equal(load(files["model.safetensors"])["head.weight"], one.model.state_dict()["head.weight"])
    assert head(files["README.md"])["license"] == "mit"
    assert b"# Toy" in files["README.md"]
    again = one.push_to_hub("Again", model_name="Toy", tags="tiny", license="mit")
    assert again == url and summaries(hub) == ["Second thoughts"]  # nothing new: no commit


def test_without_blocking_a_future_has_the_url(hub: HubServer, tmp_path: Path) -> None:
    gate = threading.Event()
    hub.fault = lambda method, path: None if gate.wait(5) else 500
    one = trainer(tmp_path, ROWS, hub_model_id="org/toy", max_steps=1)
    future: Any = one.push_to_hub(blocking=False, token=hub.token, revision="draft")
    assert isinstance(future, Future) and not future.done()
    gate.set()
    assert future.result(20).startswith(f"{hub.endpoint}/org/toy/tree/")
    assert "draft" in hub.repos["org/toy"].branches
    assert one._trainflow.publisher.queue.wait(unless=lambda: False)


def test_hub_revision_private_and_a_name_from_output_dir(hub: HubServer, tmp_path: Path) -> None:
    given: dict[str, Any] = {"push_to_hub": True, "hub_token": hub.token, "hub_private_repo": True}
    one = trainer(tmp_path / "my-model", ROWS, hub_revision="v2", hub_strategy="end", max_steps=1, **given)
    assert one.hub_model_id == "me/my-model"  # made by the time training may begin
    one.train()
    repo = hub.repos["me/my-model"]
    assert repo.private
    assert repo.branches["v2"] != repo.branches["main"]


def test_a_users_save_model_pushes_and_an_internal_one_does_not(hub: HubServer, tmp_path: Path) -> None:
    one, _ = pushing(tmp_path, hub, hub_strategy="end")
    one.save_model(_internal_call=True)
    assert summaries(hub) == []
    one.save_model()
    assert summaries(hub) == ["Model save"]


def test_init_git_repo_is_the_old_name(hub: HubServer, tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, hub_model_id="toy", hub_token=hub.token)
    one.init_git_repo(at_init=True)
    assert one.hub_model_id == "me/toy" and "me/toy" in hub.repos


# ---------------------------------------------------------------------------------------------------------- strategies
IN_PROGRESS = [f"Training in progress, step {step}" for step in (1, 2)]
STRATEGIES: dict[str, tuple[list[str], set[str]]] = {
    "end": (["End of training"], set()),
    "every_save": (IN_PROGRESS, set()),
    "checkpoint": (IN_PROGRESS, {"last-checkpoint"}),
    "all_checkpoints": (IN_PROGRESS, {f"checkpoint-{step}" for step in (1, 2, 3)}),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_pushes_what_it_says(strategy: str, hub: HubServer, tmp_path: Path) -> None:
    one, waiting = pushing(tmp_path, hub, hub_strategy=strategy, save_total_limit=1)
    one.train()
    first, folders = STRATEGIES[strategy]
    assert summaries(hub)[: len(first)] == first
    assert waiting.started == ([3] if strategy == "end" else [1, 2, 3, 3])
    files = newest(hub)
    assert {path.partition("/")[0] for path in files if "checkpoint" in path} == folders
    assert torch.equal(load(files["model.safetensors"])["head.weight"], one.model.state_dict()["head.weight"])
    assert not one._trainflow.publisher.queue.is_busy  # awaited at the end
    assert not any(hub.token.encode() in data for data in files.values())


def test_last_checkpoint_on_the_hub_can_be_resumed_from(hub: HubServer, tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_train_epochs": 2, "max_steps": -1, "save_steps": 2}
    stopped, _ = pushing(tmp_path / "a", hub, hub_strategy="checkpoint", callbacks=[StopAt(4)], **given)
    assert preempted_at(stopped) == 4
    assert stopped._trainflow.publisher.queue.wait(unless=lambda: False)
    local = snapshot_download("org/toy", local_dir=tmp_path / "back", endpoint=hub.endpoint, token=hub.token)
    settings: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "no"}
    resumed = trainer(tmp_path / "b", ROWS, **settings)
    resumed.train(resume_from_checkpoint=f"{local}/last-checkpoint")
    whole = trainer(tmp_path / "c", ROWS, **settings)
    whole.train()
    assert_equal(final_state(resumed), final_state(whole))


@pytest.mark.parametrize(("always", "pushed"), [(False, [1]), (True, [1, 2, 3])])
def test_a_push_under_way_lets_the_next_be_left_out(
    always: bool, pushed: list[int], hub: HubServer, tmp_path: Path
) -> None:
    gate, kept = threading.Event(), []
    given: dict[str, Any] = {"hub_model_id": "org/toy", "hub_token": hub.token, "hub_always_push": always}
    one = trainer(tmp_path, ROWS, save_total_limit=1, **given, **EACH_STEP)
    hub.fault = lambda method, path: None if gate.wait(10) else 500

    class Open(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert state.global_step == 3  # no save waited for the Hub
            kept.extend(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
            gate.set()

    one.add_callback(Open())
    one.train()
    assert {"checkpoint-1", "checkpoint-3"} <= set(kept)  # one that is read is not removed
    assert always or len(kept) == 2
    said = summaries(hub)
    assert [f"Training in progress, step {step}" for step in pushed] == [line for line in said if "progress" in line]
    # The push at the end waits for those before it and is never left out.
    assert torch.equal(load(newest(hub)["model.safetensors"])["head.weight"], one.model.state_dict()["head.weight"])


# ------------------------------------------------------------------------------------------------------------ failures
def test_no_failure_of_a_push_ends_training(hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, _ = pushing(tmp_path, hub)
    hub.fault = lambda method, path: 503
    one.train()
    assert one.state.global_step == 3
    assert caplog.text.count("A push failed; training continues") == 4
    assert hub.token not in caplog.text
    with pytest.raises(StorageError, match="The Hub failed"):  # one of the user's own raises
        one.push_to_hub()


def test_a_hub_that_is_down_at_the_start_is_asked_again(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fault = lambda method, path: 503
    one, _ = pushing(tmp_path, hub, hub_strategy="end")
    assert "The Hub cannot be reached; training starts" in caplog.text
    hub.fault = lambda method, path: None
    one.train()
    assert summaries(hub) == ["End of training"]
    assert one.hub_model_id == "org/toy"


def test_a_token_that_is_refused_is_named_before_the_first_step(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hub_model_id = hf://org/toy: The Hub refuses the upload .*HF_TOKEN"):
        pushing(tmp_path, hub, hub_token="hf_wrong")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["two words", "a/b/c", "owner/"])
def test_names_no_repository_can_have_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"hub_model_id = {name}: The name is neither a repository nor a folder"):
        trainer(tmp_path, ROWS, push_to_hub=True, hub_model_id=name)


def test_the_token_is_nowhere_on_disk(hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        one, _ = pushing(tmp_path, hub, report_to="jsonl")
        one.train()
        one.save_state()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if hub.token.encode() in path.read_bytes()]
    assert hub.token not in caplog.text
    assert json.loads((tmp_path / "training_args.json").read_text())["hub_token"] == "<HUB_TOKEN>"


# ---------------------------------------------------------------------------------------------------- card, and folder
class Based(Classifier):
    """A model that says where it came from, as transformers' do."""

    model_tags = ("from-the-model",)

    class config:
        _name_or_path = "org/base"


def test_the_card_has_what_was_given_and_what_is_known(hub: HubServer, tmp_path: Path) -> None:
    hub.repos["org/base"] = Repo(private=False, tags=["license:apache-2.0", "x"])
    hub.repos["org/base"].add("main", "initial commit", "", {})
    given: dict[str, Any] = {"eval_dataset": ROWS, "eval_strategy": "epoch", "num_train_epochs": 1}
    one = trainer(tmp_path, ROWS, model=Based(), hub_model_id="org/toy", hub_token=hub.token, **given)
    one.train()
    data = {"dataset_tags": "org/rows", "dataset": "Rows", "dataset_args": "split: all"}
    one.create_model_card(language="en", tags=["tiny"], model_name="A Toy", tasks="text-classification", **data)
    readme = (tmp_path / "README.md").read_bytes()
    found = head(readme)
    assert found["language"] == ["en"] and found["license"] == "apache-2.0" and found["base_model"] == "org/base"
    assert {"tiny", "from-the-model", "trainflow"} <= set(found["tags"])
    assert found["datasets"] == ["org/rows"] and found["pipeline_tag"] == "text-classification"
    result = found["model-index"][0]["results"][0]
    assert result["task"]["type"] == "text-classification"
    assert result["dataset"] == {"name": "Rows (eval)", "type": "org/rows", "split": "eval", "args": "split: all"}
    loss = next(entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry)
    assert result["metrics"] == [{"type": "loss", "name": "loss", "value": loss}]
    assert b"# A Toy" in readme and b"learning_rate" in readme


@pytest.mark.parametrize("name", ["lr=0.001,bs=8", "my run", "lora+", "-x", "x" * 120])
def test_a_folder_whose_name_no_repository_can_have_gets_its_card(name: str, tmp_path: Path) -> None:
    one = trainer(tmp_path / name, ROWS)
    one.create_model_card()
    assert f"\n# {name}\n" in (tmp_path / name / "README.md").read_text()
    with pytest.raises(ConfigError, match="neither a repository nor a folder"):
        one.push_to_hub()


def test_tags_and_licence_of_a_card_that_is_there_are_kept(tmp_path: Path) -> None:
    tmp_path.joinpath("README.md").write_text(
        "---\nlicense: cc-by-4.0\ntags: [mine]\nlanguage: de\nlibrary_name: peft\n---\n# Mine\n"
    )
    one = trainer(tmp_path, ROWS, hub_model_id="org/toy")
    one.create_model_card(tags="more")
    found = head((tmp_path / "README.md").read_bytes())
    assert found["license"] == "cc-by-4.0" and found["library_name"] == "peft" and found["language"] == ["de"]
    assert {"mine", "more"} <= set(found["tags"])
    one.create_model_card(license="mit")
    assert head((tmp_path / "README.md").read_bytes())["license"] == "mit"


@pytest.mark.parametrize("url", ["memory://hub/toy", "folder"])
def test_a_folder_on_any_store_is_the_offline_hub(url: str, tmp_path: Path) -> None:
    target = url if "://" in url else str(tmp_path / url)
    given: dict[str, Any] = {**EACH_STEP, "hub_model_id": target, "hub_strategy": "checkpoint"}
    trainer(tmp_path / "out", ROWS, **given).train()
    revision = FolderHub(target).newest()
    assert revision is not None
    names = {entry.path for entry in revision.commit.files}
    assert {"README.md", "model.safetensors", "last-checkpoint/COMMIT.json", "last-checkpoint/optimizer.json"} <= names
    resumed = trainer(tmp_path / "b", ROWS, max_steps=5)
    resumed.train(resume_from_checkpoint=f"{revision.store.url}/last-checkpoint")
    assert resumed.state.global_step == 5
    if "://" in url:
        revision.store.delete_tree()
