"""push-to-hub as a stage: against a folder and against a server that speaks the Hub's protocol."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCard

from tests.support.hub_server import Blob, HubServer
from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.hub.folder import FolderHub
from trainer_lib.protocol.requests import PreparedSplit
from trainflow.tasks.configs import PublishConfig
from trainflow.tasks.keys.keys import publish_key, stage_key
from trainflow.tasks.push_to_hub import push_to_hub
from trainflow.tasks.stage.facts import EvaluateFacts, PrepareFacts, PublishFacts, TrainFacts
from trainflow.tasks.stage.runner import StageAttempt, StageContext, StageManifest, StageOutput, run_stage

WEIGHTS = bytes(range(256)) * 8192


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "storage")


def _context(storage: str, *force: str) -> StageContext:
    recipe = Path(storage).with_name("recipe.py")
    recipe.write_text("def build_model(options, data): ...\n")
    return StageContext(name="digits", recipe=str(recipe), storage=storage, force=frozenset(force))


def _stage(storage: str, stage: str, fields: dict[str, Any], files: dict[str, bytes], **more: Any) -> StageManifest:
    """A committed stage, as the stages before leave it."""

    def work(attempt: StageAttempt) -> StageOutput:
        return StageOutput([attempt.store.write_bytes(path, data) for path, data in files.items()], **more)

    return run_stage(stage_key(stage, fields), _context(storage), work)


def _inputs(storage: str, weights: bytes = WEIGHTS, accuracy: float = 0.984) -> dict[str, Any]:
    splits = PrepareFacts({"train": PreparedSplit(1437), "test": PreparedSplit(360)})
    args = {"learning_rate": 2e-3, "global_batch_size": 64, "seed": 42}
    model = {"model/model.safetensors": weights, "model/config.json": b"{}"}
    metrics = {"test": {"test_accuracy": accuracy, "test_runtime": 3.0}}
    measured = {"samples.txt": b"hello", "metrics.json": b"{}"}
    return {
        "data": _stage(storage, "prepare-data", {"a": 1}, {"data/test/00000.arrow": b"rows"}, facts=splits),
        "model": _stage(
            storage, "train", {"args": args, "w": weights[:9].hex()}, model, facts=TrainFacts(parameters=12345)
        ),
        "evaluation": _stage(storage, "evaluate", {"m": accuracy}, measured, metrics=metrics),
    }


def _push(storage: str, config: PublishConfig, inputs: dict[str, Any], *force: str) -> StageManifest[PublishFacts]:
    return push_to_hub.fn(config, _context(storage, *force), **inputs)


def test_a_folder_below_the_storage_is_the_default_hub_and_its_card_tells_lineage(storage: str) -> None:
    inputs = _inputs(storage)
    manifest = _push(storage, PublishConfig(title="Digits", license="apache-2.0", tags=["vision"]), inputs)
    folder = Path(manifest.facts.published_url)
    assert folder.parent == Path(storage) / "hub" / "digits" / "revisions"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [path.name for path in (folder / "evaluation").iterdir()] == ["samples.txt"]
    assert json.loads((folder / "metrics.json").read_text()) == {"test": {"accuracy": 0.984}}
    text = (folder / "README.md").read_text()
    data: Any = ModelCard(text).data
    assert [(one.metric_type, one.metric_value) for one in data.eval_results] == [("accuracy", 0.984)]
    assert data.to_dict()["trainflow"] == {
        "data_digest": inputs["data"].content_digest,
        "stage_keys": {one.stage: one.key for one in inputs.values()},
    }
    for part in ("`learning_rate` | 0.002", "1,437", "12,345", hashlib.sha256(WEIGHTS).hexdigest()):
        assert part in text


def test_a_model_of_conversations_tells_its_bases_licence_and_quotes_none_of_them(storage: str) -> None:
    base = Path(storage).with_name("base")
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    counts = {"documents": 8, "tokens_in": 200, "tokens_trained": 50}
    info = {"chat_template": "{{ x }}", "system": None, "shapes": {"messages": 9}, "packing": {"train": counts}}
    facts = PrepareFacts({"train": PreparedSplit(8)}, info={**info, "unpublished": ["conversations.txt"]})
    assets = {"assets/tokenizer/tokenizer.json": b"{}", "assets/conversations.txt": b"quoted"}
    weights = {"model/model.safetensors": WEIGHTS, "model/config.json": b'{"model_type": "llama"}'}
    trained = TrainFacts(model={"folder": "base"})
    inputs = {
        "data": _stage(storage, "prepare-data", {"a": 2}, assets, facts=facts),
        "model": _stage(storage, "train", {"args": {}, "w": "base"}, weights, facts=trained),
        "evaluation": _inputs(storage)["evaluation"],
    }
    published = Path(_push(storage, PublishConfig(), inputs).facts.published_url)
    text = (published / "README.md").read_text()
    head: Any = ModelCard(text).data
    assert head.license == "mit"
    assert "| train | 8 | 200 | 25.0% |" in text
    assert 'subfolder="assets/tokenizer"' in text
    assert [path.name for path in published.rglob("assets/**/*.*")] == ["tokenizer.json"]


def test_pictures_lie_where_the_cards_link_to_and_rows_are_shown_to_who_asks_for_them(storage: str) -> None:
    kept = {
        "kind": "classes",
        "matrix": [[7, 1], [0, 12]],
        "reliability": [[0.9, 0.95, 20]],
        "samples": [],
        "hardest": [[4711, 0, 1, 3.25], [17, 0, 0, 0.5]],
    }
    files = {"outcomes/test.json": json.dumps(kept).encode(), "metrics.json": b"{}"}
    metrics = {"test": {"accuracy": 0.95, "accuracy_low": 0.9, "accuracy_high": 1.0}}
    facts = EvaluateFacts(confidence=0.9)
    evaluation = _stage(storage, "evaluate", {"m": 1}, files, metrics=metrics, facts=facts)
    inputs = {**_inputs(storage), "evaluation": evaluation}
    published = Path(_push(storage, PublishConfig(), inputs).facts.published_url)
    for folder in (published, published.parent.parent):  # the revision, and the card above all revisions
        card = (folder / "README.md").read_text()
        links = re.findall(r"!\[.*?\]\((.*?)\)", card)
        assert [link.rpartition("/")[2] for link in links] == ["confusion-test.svg", "reliability-test.svg"]
        assert all((folder / link).read_bytes().startswith(b"<svg ") for link in links)
        assert "| accuracy | 0.95 (0.9 to 1) |" in card
        assert "with a probability of 0.9" in card
        assert "4711" not in card
    assert not list(published.rglob("outcomes"))
    card = (Path(_push(storage, PublishConfig(hardest_rows=1), inputs).facts.published_url) / "README.md").read_text()
    assert "| row_id | label | prediction | nats |" in card
    assert "| 4,711 | 0 | 1 | 3.25 |" in card
    assert "| 17 |" not in card


BETTER = PublishConfig(only_if="better", metric="test_accuracy")


def _compared(
    storage: str, accuracy: float, *, split: str = "test", rows: str = "r1", weights: bytes = b"weights", **more: Any
) -> Any:
    """Inputs whose evaluation has the accuracy on resamples of some rows."""
    resampled = [accuracy + 0.001 * (number % 10) for number in range(200)]
    record = {"rows": rows, "metrics": {"accuracy": resampled, **more}}
    files = {f"resamples/{split}.json": json.dumps(record).encode(), "metrics.json": b"{}"}
    metrics = {"test": {}, split: {"accuracy": accuracy, **dict.fromkeys(more, 0.5)}}
    evaluation = _stage(storage, "evaluate", {"m": accuracy, "rows": rows}, files, metrics=metrics)
    return {**_inputs(storage, weights), "evaluation": evaluation}


@pytest.mark.parametrize(("to", "split"), [(None, "test"), ("hf://org/digits", "test"), (None, "test_hard")])
def test_only_a_better_model_is_published_where_that_is_asked(
    storage: str, to: str | None, split: str, hub: HubServer
) -> None:
    config = BETTER.model_copy(update={"to": to, "metric": f"{split}_accuracy"})
    compared = partial(_compared, storage, split=split)
    first = _push(storage, config, compared(0.8))
    assert (first.facts.created, first.facts.held) == (True, None)
    assert "verdict.json" not in [entry.path for entry in first.files]
    kept: PublishFacts | None = None
    for accuracy, is_better in ((0.8, False), (0.7, False), (0.9, True), (0.85, False)):
        pushed = _push(storage, config, compared(accuracy, weights=b"%f" % (accuracy + 1)))
        verdict = json.loads(pushed.store().read_bytes("verdict.json"))
        words = "is better than" if is_better else "is not clearly better than"
        assert f"{split}_accuracy {words}" in verdict["reason"]
        assert (pushed.facts.created, pushed.facts.held) == (is_better, None if is_better else verdict["reason"])
        if not is_better:
            before = (kept or first.facts).published_url
            assert pushed.facts.published_url == before
            assert _push(storage, config, compared(accuracy, weights=b"%f" % (accuracy + 1))) == pushed
        else:
            kept = pushed.facts
    # Another card of the published model, and what is always published, need no comparison.
    best = compared(0.9, weights=b"%f" % 1.9)
    assert _push(storage, config.model_copy(update={"title": "New title"}), best).facts.created
    worst = compared(0.1, weights=b"worst")
    assert _push(storage, config.model_copy(update={"only_if": "always"}), worst).facts.created


@pytest.mark.parametrize(
    ("change", "config", "what"),
    [
        ({"rows": "r2"}, {}, "without code it cannot be measured"),
        ({}, {"metric": "test_f1"}, "no such metric"),
        ({"f1": [0.5] * 200}, {"metric": "test_f1"}, "without code it cannot be measured"),
        ({"evaluation": None}, {}, "Nothing was evaluated"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(
    storage: str, change: dict[str, Any], config: dict[str, Any], what: str
) -> None:
    asked = BETTER.model_copy(update={"code": False, **config})
    _push(storage, BETTER.model_copy(update={"code": False}), _compared(storage, 0.8))
    inputs = _compared(storage, 0.9, weights=b"new", **({} if "evaluation" in change else change))
    with pytest.raises(ConfigError, match=what) as caught:
        _push(storage, asked, {**inputs, **({"evaluation": None} if "evaluation" in change else {})})
    assert caught.value.field in ("publish.only_if", "publish.metric")


def test_the_hub_gets_nothing_new_from_a_second_or_forced_run_and_a_revision_of_another_model(storage: str) -> None:
    inputs = _inputs(storage)
    first = _push(storage, PublishConfig(), inputs)
    assert _push(storage, PublishConfig(), inputs) == first
    again = _push(storage, PublishConfig(), inputs, "push-to-hub")
    assert (first.facts.created, again.facts.created) == (True, False)
    assert again.facts.revision == first.facts.revision
    assert len(FolderHub(f"{storage}/hub/digits").revisions()) == 1
    _push(storage, PublishConfig(), _inputs(storage, weights=b"other weights"))
    assert len(FolderHub(f"{storage}/hub/digits").revisions()) == 2


@pytest.mark.parametrize("harm", ["removed", "truncated"])
def test_a_publication_that_is_gone_or_damaged_is_made_again(storage: str, harm: str) -> None:
    inputs = _inputs(storage)
    published = Path(_push(storage, PublishConfig(), inputs).facts.published_url)
    if harm == "removed":
        shutil.rmtree(published)
    else:
        (published / "model.safetensors").write_bytes(b"short")
    again = _push(storage, PublishConfig(), inputs)
    assert again.facts.created
    assert "is gone, or not as it was published" in again.reason
    assert (Path(again.facts.published_url) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_publication_below_a_storage_that_moved_is_found_and_shown_where_it_is_now(storage: str) -> None:
    published = _push(storage, PublishConfig(), _inputs(storage)).facts.published_url
    moved = f"{storage}-moved"
    shutil.move(storage, moved)
    again = _push(moved, PublishConfig(), _inputs(moved))
    assert again.attempt == 1
    assert again.facts.published_url == published.replace(storage, moved)
    assert Path(again.facts.published_url).is_dir()
    elsewhere = PublishConfig(to=f"{storage}-hub")
    assert _push(moved, elsewhere, _inputs(moved)).facts.below is None


def test_the_authors_edits_on_the_hub_are_kept_in_the_next_commit(storage: str, hub: HubServer) -> None:
    to = PublishConfig(to="hf://org/digits")
    _push(storage, to, _inputs(storage))
    repo = hub.repos["org/digits"]
    # As a person, or a leaderboard, edits it.
    edited: Any = ModelCard(repo.commits[-1].files["README.md"].data.decode())
    edited.text = edited.text.replace("*To be filled in by the author", "Not for cheques. *To be")
    edited.data.license, edited.data.tags = "mit", [*edited.data.tags, "cheques"]
    facts: dict[str, Any] = {
        "dataset_type": "bank/cheques",
        "dataset_name": "Cheques",
        "metric_type": "accuracy",
        "metric_value": 0.5,
    }
    edited.data.eval_results.append(EvalResult(task_type="image-classification", **facts))
    files = {**repo.commits[-1].files, "README.md": Blob(str(edited).encode(), lfs=False)}
    repo.add("main", "by hand", "", files)
    _push(storage, to, _inputs(storage, accuracy=0.99))
    text = repo.commits[-1].files["README.md"].data.decode()
    assert "Not for cheques." in text and "| accuracy | 0.99 |" in text
    card: Any = ModelCard(text, ignore_metadata_errors=False).data
    assert card.license == "mit" and {"cheques", "trainflow"} <= set(card.tags)
    results = {(each.dataset_type, each.metric_type): each.metric_value for each in card.eval_results}
    assert results["bank/cheques", "accuracy"] == 0.5
    assert [value for (kind, name), value in results.items() if name == "accuracy" and kind != "bank/cheques"] == [0.99]
    assert _push(storage, to, _inputs(storage, accuracy=0.99), "push-to-hub").facts.created is False


def test_the_card_names_base_hardware_curve_and_the_librarys_own_way_to_load_it(storage: str) -> None:
    inputs = _inputs(storage)
    config = json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}).encode()
    history = json.dumps([{"step": step, "loss": 1 / step, "epoch": 1.0} for step in range(1, 31)]).encode()
    model = {"model/model.safetensors": b"w", "model/config.json": config, "history.json": history}
    facts = TrainFacts(device="NVIDIA H100", world_size=8)
    inputs["model"] = _stage(storage, "train", {"args": {}, "w": "bert"}, model, facts=facts)
    manifest = _push(storage, PublishConfig(base_model="org/base@abc123", to=f"{storage}/other"), inputs)
    text = (Path(manifest.facts.published_url) / "README.md").read_text()
    data: Any = ModelCard(text).data
    assert (data.library_name, data.base_model) == ("transformers", "org/base")
    for part in (
        'BertForSequenceClassification.from_pretrained(".")',
        "Fine-tuned from `org/base` at revision `abc123`.",
        "- Hardware: 8 x NVIDIA H100",
        "| 30 | 0.0333333 |",
    ):
        assert part in text
    assert len([line for line in text.splitlines() if line.startswith("| ") and "| 0." in line]) < 20


def test_the_key_holds_no_path_of_the_storage(storage: str) -> None:
    assert storage not in json.dumps(publish_key(PublishConfig(), _context(storage), **_inputs(storage)).fields)


def test_a_hub_that_fails_in_the_middle_is_retried_and_ends_with_one_commit(storage: str, hub: HubServer) -> None:
    config, inputs = PublishConfig(to="hf://org/digits"), _inputs(storage)
    hub.fault = lambda method, path: 500 if "/commit/" in path else None
    with pytest.raises(StorageError, match="The Hub failed") as caught:
        _push(storage, config, inputs)
    assert caught.value.retryable
    hub.fault = lambda method, path: None
    manifest = _push(storage, config, inputs)
    assert manifest.attempt == 2
    repo = hub.repos["org/digits"]
    assert [commit.summary[:7] for commit in repo.commits] == ["initial", "Publish"]
    record = json.loads(repo.commits[-1].files["trainflow.json"].data)
    assert record["content_digest"] == manifest.facts.published_digest
    assert repo.private
    assert _push(storage, config, inputs) == manifest  # a hit
    _push(storage, config, inputs, "push-to-hub")
    assert len(repo.commits) == 2


def test_a_hub_that_cannot_be_asked_leaves_a_hit_and_a_repository_that_was_deleted_is_made_again(
    storage: str, hub: HubServer
) -> None:
    config, inputs = PublishConfig(to="hf://org/digits"), _inputs(storage)
    first = _push(storage, config, inputs)
    hub.fault = lambda method, path: 503
    assert _push(storage, config, inputs) == first
    hub.fault = lambda method, path: None
    del hub.repos["org/digits"]
    assert _push(storage, config, inputs).facts.created
    assert "org/digits" in hub.repos


def test_a_manifest_of_the_wrong_stage_or_without_a_model_is_bad_input(storage: str) -> None:
    inputs = _inputs(storage)
    with pytest.raises(ConfigError, match="train"):
        _push(storage, PublishConfig(), {**inputs, "model": inputs["data"]})
    with pytest.raises(ConfigError, match="no adapters") as refused:
        _push(storage, PublishConfig(merge_adapters=True), inputs)
    assert (refused.value.field, refused.value.value) == ("publish.merge_adapters", "true")
    assert "train.model.adapter" in str(refused.value.remedy)
    empty = _stage(storage, "train", {"x": 1}, {"other.txt": b""})
    with pytest.raises(ConfigError, match="no model"):
        _push(storage, PublishConfig(), {**inputs, "model": empty})
