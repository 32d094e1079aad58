"""The chain is found from any link; a changed byte is caught at every link; what is out of reach does not count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.support.command import Cli, trainflow
from tests.support.hub_server import HubServer
from tests.support.runs import only_folder, publication_of, ran, run, run_of
from trainer_lib.errors import BrokenLineageError, ConfigError
from trainer_lib.model_folder.lineage import FILE, read_lineage_file
from trainer_lib.model_folder.locate import find_model
from trainer_lib.storage import Store
from trainer_lib.storage.commit import write_commit
from trainer_lib.trackers.mlflow import mlflow_registry as registry
from trainer_lib.trackers.mlflow.mlflow_client import Clock, connect, connect_timed
from trainer_lib.trackers.mlflow.mlflow_registry import DIGEST_TAG
from trainflow.flows.cli.commands import checkpoints
from trainflow.flows.lineage.lineage_chain import find_chain
from trainflow.flows.lineage.lineage_checks import LinkCheck, find_failure, verify_chain
from trainflow.flows.records.past_runs import find_run
from trainflow.tasks.configs import TrackingConfig

STAGES = ["prepare-data", "train", "evaluate", "predict", "push-to-hub"]
CHECKPOINTS = ["checkpoint-4", "checkpoint-8"]


def _checked(address: object, **how: Any) -> dict[str, LinkCheck]:
    found = verify_chain(find_chain(str(address), lenient=True, **how), TrackingConfig())
    return {check.link: check for check in found}


def _states(checks: dict[str, LinkCheck], state: str) -> list[str]:
    return [link for link, check in checks.items() if check.state == state]


def _flip(path: Path, at: bytes = b"") -> None:
    """Change one byte: the first one after `at`, else the one in the middle."""
    data = bytearray(path.read_bytes())
    position = data.index(at) + len(at) if at else len(data) // 2
    data[position] = data[position] ^ 1
    path.write_bytes(data)


# -- the chain --------------------------------------------------------------------------------------------------------
def test_every_link_leads_to_the_same_chain(folder: Path) -> None:
    store, recorded, published = folder / "store", run_of(folder), publication_of(folder)
    record = json.loads((recorded / "run.json").read_text())
    train, predict = only_folder(store / "stages" / "train"), only_folder(store / "stages" / "predict")
    addresses = dict.fromkeys((recorded, recorded / "report.html"), "run")
    addresses |= dict.fromkeys((published, store / "hub" / "toy"), "publication")
    addresses |= dict.fromkeys((train, train / "checkpoints", predict, predict / "predictions" / "test"), "stage")
    addresses[train / "checkpoints" / "checkpoint-4"] = "checkpoint"
    chains = [(kind, find_chain(str(address))) for address, kind in addresses.items()]
    words = (record["mlflow_run_id"], recorded.name, recorded.name[:6], record["run_name"], "last")
    chains += [("run", find_chain(word, home=str(store))) for word in words]
    for kind, chain in [("stage", find_chain(f"{train / 'model'}/")), *chains]:
        assert chain.kind == kind
        assert [link.stage for link in chain.lineage.stages] == STAGES
        assert chain.run is not None and chain.run.id == recorded.name
        assert chain.publication is not None and chain.publication.url == str(published)
        assert [each.name for each in chain.lineage.checkpoints] == CHECKPOINTS
        assert chain.lineage.exported == "checkpoint-8"
        assert chain.lineage.mlflow_run_id == record["mlflow_run_id"]
        assert chain.lineage.publication is not None
        assert chain.lineage.publication.revision == published.name


def test_an_address_that_a_run_prints_is_taken_by_every_command(folder: Path) -> None:
    store, run = folder / "store", run_of(folder)
    train, predict = only_folder(store / "stages" / "train"), only_folder(store / "stages" / "predict")
    inside = (run, run / "report.html", train, train / "model", train / "checkpoints" / "checkpoint-8")
    for address in map(str, (*inside, predict / "predictions" / "test")):
        assert find_run(str(store), address, field="RUN").id == run.name, address
    for address in map(str, (*inside, publication_of(folder))):
        assert find_model(address).description.name == "toy", address
    for address in map(str, (train, train / "model", train / "checkpoints")):
        assert [entry.name for entry in checkpoints.find(address)] == CHECKPOINTS[::-1], address
    for unknown in (train / "weights", run / "model"):
        with pytest.raises(ConfigError, match="There is no lineage"):
            find_chain(str(unknown))


def test_the_published_lineage_holds_neither_times_nor_places(folder: Path) -> None:
    text = (publication_of(folder) / FILE).read_text()
    assert str(folder) not in text and "://" not in text
    published, recorded = (
        read_lineage_file(Store.open(str(each))) for each in (publication_of(folder), run_of(folder))
    )
    assert published is not None and recorded is not None
    assert [link.stage for link in published.stages] == ["prepare-data", "train", "evaluate"]
    assert published.stages == tuple(link for link in recorded.stages if link in published.stages)
    assert published.versions["python"].count(".") == 2


def test_a_model_in_mlflow_leads_to_its_training(finished: Path) -> None:
    uri = f"sqlite:///{finished / 'store' / 'mlflow.db'}"
    models = {each.name: each.model_id for each in _models(uri)}
    assert set(models) == {"toy", *CHECKPOINTS}
    env = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
    # In a process of its own, because MLflow's download leaves threads.
    done = trainflow("lineage", f"models:/{models['checkpoint-4']}", "--json", env=env).ok()
    found = json.loads(done.out)
    assert (found["kind"], found["run"]) == ("model", run_of(finished).name)
    assert [link["stage"] for link in found["lineage"]["stages"]] == STAGES
    assert found["mlflow"]["run_id"] == found["lineage"]["mlflow_run_id"]


def _models(uri: str) -> list[Any]:
    client: Any = connect(uri)
    return list(client.search_logged_models([each.experiment_id for each in client.search_experiments()]))


# -- verify -----------------------------------------------------------------------------------------------------------
def test_an_intact_chain_holds_at_every_link(folder: Path) -> None:
    checks = _checked(run_of(folder))
    assert list(checks) == [*STAGES[:2], *CHECKPOINTS, *STAGES[2:], "publication", "run", "MLflow run"]
    assert _states(checks, "held") == list(checks), checks
    assert find_failure(list(checks.values())) is None
    assert all(check.bytes > 0 for check in checks.values() if check.link != "MLflow run")


def test_the_chain_holds_on_an_object_store_and_a_changed_byte_breaks_it(folder: Path, s3_url: str) -> None:
    storage, s3 = f"{s3_url}/store", fsspec.filesystem("s3", use_listings_cache=False)
    s3.put(f"{folder / 'store'}/", storage.removeprefix("s3://"), recursive=True)
    run = f"{storage}/runs/{run_of(folder).name}"
    shutil.rmtree(folder / "store")
    checks = _checked(run)
    assert _states(checks, "not checked") == ["MLflow run"]  # its database lay beside the local storage
    assert _states(checks, "broken") == []
    assert len(_states(checks, "held")) == 9
    assert find_chain(f"{storage}/hub/toy").lineage == find_chain(run).lineage
    [weights] = s3.glob(f"{storage}/stages/train/*/model/model.safetensors")
    s3.pipe(weights, bytes(s3.size(weights)))
    assert _states(_checked(run), "broken") == ["train"]


@pytest.fixture(scope="module")
def intact(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished, tmp_path_factory.mktemp("intact") / "project"))


RUN, PUBLISHED, STAGE = "runs/*", "hub/toy/revisions/*", "stages/"


@pytest.mark.parametrize(
    ("link", "path", "at"),
    [
        ("prepare-data", f"{STAGE}prepare-data/*/data/train/00000.arrow", b""),
        ("prepare-data", f"{STAGE}prepare-data/*/COMMIT.json", b""),
        ("prepare-data", f"{STAGE}prepare-data/*/key.json", b'"rows": '),
        ("train", f"{STAGE}train/*/model/model.safetensors", b""),
        ("train", f"{STAGE}train/*/key.json", b'"seed": '),
        ("train", f"{STAGE}train/*/key.json", b'"data": "'),
        ("train", f"{STAGE}train/*/COMMIT.json", b'"tracked_run": "'),
        ("checkpoint-4", f"{STAGE}train/*/checkpoints/checkpoint-4/optimizer.safetensors", b""),
        ("checkpoint-8", f"{STAGE}train/*/checkpoints/checkpoint-8/COMMIT.json", b""),
        ("evaluate", f"{STAGE}evaluate/*/metrics.json", b""),
        ("predict", f"{STAGE}predict/*/predictions/test/part-00001.parquet", b""),
        ("push-to-hub", f"{STAGE}push-to-hub/*/README.md", b""),
        ("push-to-hub", f"{STAGE}push-to-hub/*/COMMIT.json", b'"revision": "'),
        ("publication", f"{PUBLISHED}/model.safetensors", b""),
        ("publication", f"{PUBLISHED}/code/recipe.py", b""),
        ("publication", f"{PUBLISHED}/{FILE}", b""),
        ("publication", f"{PUBLISHED}/{FILE}", b"{"),
        ("publication", f"{PUBLISHED}/COMMIT.json", b""),
        ("run", f"{RUN}/spec.yaml", b""),
        ("run", f"{RUN}/source/recipe.py", b""),
        ("run", f"{RUN}/trainflow_model.json", b""),
        ("run", f"{RUN}/{FILE}", b""),
        ("run", f"{RUN}/{FILE}", b"{"),
        ("run", f"{RUN}/run.json", b'"evaluate": "'),
    ],
)
def test_a_changed_byte_is_caught_and_its_link_and_file_are_named(
    intact: Path, link: str, path: str, at: bytes
) -> None:
    [file] = (intact / "store").glob(path)
    whole = file.read_bytes()
    _flip(file, at)
    checks = _checked(run_of(intact))
    file.write_bytes(whole)
    assert link in _states(checks, "broken"), checks
    assert any(file.name in problem for problem in checks[link].problems), checks[link]
    failure = find_failure(list(checks.values()))
    assert isinstance(failure, BrokenLineageError) and failure.exit_code == 16
    others = set(_states(checks, "broken")) - {link}
    # A commit file that cannot be read hides what it says of others; run.json names the stage that was changed.
    assert others <= ({"publication"} if link == "push-to-hub" else {"evaluate"} if "run.json" in path else set()), (
        others
    )


def test_a_stage_that_was_replaced_by_a_whole_one_is_caught(folder: Path) -> None:
    train = Store.open(str(only_folder(folder / "store" / "stages" / "train")))
    record = json.loads(train.read_bytes("COMMIT.json"))
    entries = [train.write_bytes(each["path"], train.read_bytes(each["path"]) + b" ") for each in record["files"]]
    train.delete("COMMIT.json")
    write_commit(train, "stage", entries, record["meta"])
    broken = _checked(run_of(folder))
    assert "the lineage has" in broken["train"].problems[0]
    # What was made from it names the digest that it had.
    assert _states(broken, "broken") == ["train", "publication"]


def test_what_mlflow_says_otherwise_is_caught(folder: Path) -> None:
    uri = f"sqlite:///{folder / 'store' / 'mlflow.db'}"
    client: Any = connect_timed(uri, Clock())
    record = json.loads((run_of(folder) / "run.json").read_text())
    [model] = [each for each in _models(uri) if each.name == "toy"]
    tags = {"trainflow.train": record["stages"]["train"]}
    asked = registry.Registration(name="toy", digest=model.tags[DIGEST_TAG], tags=tags)
    registry.register(client, model.model_id, record["mlflow_run_id"], asked)
    assert _checked(run_of(folder))["toy version 1"].state == "held"
    client.set_model_version_tag("toy", "1", DIGEST_TAG, "0" * 64)
    client.set_tag(record["mlflow_run_id"], "trainflow.evaluate", "0" * 16)
    checks = _checked(run_of(folder))
    assert _states(checks, "broken") == ["MLflow run", "toy version 1"]
    assert "trainflow.evaluate" in checks["MLflow run"].problems[0]


def test_what_is_out_of_reach_is_not_checked_and_not_held(folder: Path) -> None:
    train = only_folder(folder / "store" / "stages" / "train")
    shutil.rmtree(train / "checkpoints" / "checkpoint-4")  # as a rotation does
    (folder / "store" / "mlflow.db").unlink()
    checks = _checked(run_of(folder))
    assert _states(checks, "not checked") == ["checkpoint-4", "MLflow run"]
    assert _states(checks, "broken") == []
    assert "not on the storage any more" in checks["checkpoint-4"].why
    assert find_failure(list(checks.values())) is None
    # The commit file alone is gone: no rotation does that.
    (train / "COMMIT.json").unlink()
    assert _checked(run_of(folder))["train"].state == "broken"


def test_a_copy_of_a_publication_is_verified_on_another_machine(folder: Path, tmp_path: Path, cli: Cli) -> None:
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(publication_of(folder), copy)
    there = str(shutil.move(str(folder / "store"), str(tmp_path / "moved")))
    env = {"HOME": str(tmp_path / "home"), "MLFLOW_TRACKING_URI": ""}
    done = cli("verify", copy, "--json", cwd=copy.parent, env=env).ok()
    states = {each["link"]: each["state"] for each in json.loads(done.out)["links"]}
    assert states.pop("publication") == "held"
    assert set(states.values()) == {"not checked"}
    # With the storage by its URL all of it, also where it was moved to.
    checks = _checked(copy, storage=there)
    assert _states(checks, "held") == list(checks), checks
    (copy / "COMMIT.json").unlink()
    assert _checked(copy)["publication"].state == "held"
    _flip(copy / "model.safetensors")
    done = cli("verify", copy, cwd=copy.parent, env=env)
    assert done.code == 16
    assert "broken      publication" in done.out
    assert "The link publication does not hold: model.safetensors: digest" in done.err
    (copy / "model.safetensors").unlink()
    assert _checked(copy)["publication"].problems == ("model.safetensors: missing",)


def test_an_older_publication_of_the_same_model_holds(folder: Path) -> None:
    first = publication_of(folder)
    assert ran(run(folder, "publish.title=Another", "tracking.enabled=true")) == {"push-to-hub"}
    assert _checked(first)["publication"].state == "held"
    newest = find_chain(str(folder / "store" / "hub" / "toy"))
    assert newest.publication is not None and newest.publication.url != str(first)


def test_a_publication_on_the_hub_is_verified_by_its_bytes(
    folder: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert ran(run(folder, "publish.to=hf://org/toy")) == {"push-to-hub"}
    chain = find_chain("hf://org/toy", storage=str(folder / "store"))
    assert chain.lineage.publication is not None and chain.run is not None
    assert chain.lineage.publication.revision == hub.repos["org/toy"].commits[-1].sha
    # From the run the hub is not asked; the command that asks it is named.
    left = _checked(chain.run.id, home=str(folder / "store"))["publication"]
    assert left.state == "not checked"
    assert f"trainflow verify hf://org/toy@{chain.lineage.publication.revision}" in left.why
    checks = _checked("hf://org/toy", storage=str(folder / "store"))
    assert (_states(checks, "broken"), checks["publication"].state) == ([], "held")
    [weights] = (tmp_path / "cache").rglob("snapshots/*/model.safetensors")
    _flip(weights.resolve())
    assert _checked("hf://org/toy")["publication"].problems[0].startswith("model.safetensors: digest")


# -- bad input --------------------------------------------------------------------------------------------------------
def test_an_address_that_leads_nowhere_is_bad_input(folder: Path, tmp_path: Path, cli: Cli) -> None:
    for address, words in (
        (str(tmp_path / "nothing"), "There is no lineage"),
        ("nosuch://bucket/x", "nosuch"),
        ("hf://nothing", "not one on the Hub"),
        ("abcdef", "no storage is known"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            find_chain(address)
        assert refused.value.exit_code == 2 and refused.value.remedy
    with pytest.raises(ConfigError, match="No run with this id"):
        find_chain("abcdef", home=str(folder / "store"))
    (publication_of(folder) / FILE).unlink()
    with pytest.raises(ConfigError, match="an older trainflow published it"):
        find_chain(str(publication_of(folder)))
    done = cli("verify", tmp_path / "nothing")
    assert done.code == 2
    assert "neither a publication, nor a run, a stage or a checkpoint" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("lenient", [False, True])
def test_a_hostile_lineage_is_refused_and_nothing_of_it_is_used(folder: Path, tmp_path: Path, lenient: bool) -> None:
    good = json.loads((publication_of(folder) / FILE).read_text())
    hostile: dict[str, Any] = {"files": [{"path": "../../../etc/passwd", "size": 1, "sha256": "a" * 64}]}
    # tests/unit/model_folder/test_model_folders.py has the others.
    for record in ({**good, **hostile}, {**good, "format": 99}, [good]):
        (tmp_path / FILE).write_text(json.dumps(record))
        with pytest.raises(ConfigError) as refused:
            find_chain(str(tmp_path), lenient=lenient)
        assert refused.value.exit_code == 2
        assert str(refused.value.field).endswith(FILE)


def test_a_record_of_the_hub_that_leads_out_is_not_followed(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(publication_of(folder), copy)
    (copy / "COMMIT.json").unlink()
    entry = {"path": "../secret", "size": 1, "sha256": "a" * 64}
    (copy / "trainflow.json").write_text(json.dumps({"files": [entry], "content_digest": "b" * 64}))
    check = _checked(copy)["publication"]
    assert (check.state, "leads out" in check.why) == ("not checked", True)
