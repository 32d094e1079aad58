"""DeepSpeed ZeRO trains like one process, divides what its stage says, and stops and goes on anywhere.

Importing DeepSpeed takes seconds, so one launch does many things, and the tests look at what came back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.distributed import run_distributed
from tests.support.rank_runs import train_on_tokens
from tests.support.toys import classification_rows, token_rows
from tests.support.training import assert_equal, logged
from tests.support.zero import awkward, zero

pytestmark = pytest.mark.needs("deepspeed")
TOKENS = token_rows(23)
ROWS = classification_rows(23)
CPU = {"device": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "stage 1": {"deepspeed": zero(1)},
    "stage 2": {"deepspeed": zero(2)},
    "stage 3": {"deepspeed": zero(3)},
    "stage 1, offloaded": {"deepspeed": zero(1, cpu_offload=True)},
    "stage 2, offloaded": {"deepspeed": zero(2, offload_optimizer=CPU)},
    "stage 3, offloaded": {"deepspeed": zero(3, offload_optimizer=CPU, offload_param=CPU)},
}
HALVES: dict[str, dict[str, Any]] = {
    f"stage {stage}, bf16": {"deepspeed": zero(stage), "bf16": True} for stage in (1, 2, 3)
}


def tokens(folder: str, **given: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    one = train_on_tokens(folder, **given)
    one.save_model(f"{folder}/exported")
    held = one._trainflow.engine.strategy.held_bytes(one.model_wrapped) if given else None  # type: ignore[attr-defined]
    exchanged = one._trainflow.engine.strategy.describe()
    return {"logs": logged(one), "held": held, "strategy": exchanged, "wrapped": type(one.model_wrapped).__name__}


def like_one_process(folder: str) -> dict[str, Any]:
    return {name: tokens(f"{folder}/{name}", **given) for name, given in WAYS.items()}


@pytest.fixture(scope="module")
def parity(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("parity")
    alone = tokens(str(folder / "alone"))
    return folder, alone, run_distributed(like_one_process, 2, str(folder), timeout_s=150)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_like_one(way: str, parity: Any) -> None:
    """Unequal token counts per rank, a ragged last batch, accumulation, clipping: losses to 1e-6."""
    folder, alone, ranks = parity
    for rank in ranks:
        assert rank[way]["strategy"]["strategy"] == "deepspeed"
        assert rank[way]["wrapped"] == "DeepSpeedEngine"
        for mine, theirs in zip(alone["logs"], rank[way]["logs"], strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine.keys() - {"total_flos"}:  # padding is work: how wide a micro-batch is depends on its rows
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6), name
    exported, expected = (load_file(folder / each / "exported" / "model.safetensors") for each in (way, "alone"))
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(exported[name], value, rtol=2e-5, atol=1e-7, err_msg=name)


def test_each_process_holds_its_part(parity: Any) -> None:
    """187 parameters of 4 bytes; masters and Adam's two moments are 3 times that."""
    _, _, ranks = parity
    for rank in ranks:
        held = {way: rank[way]["held"] for way in WAYS}
        assert [held[f"stage {stage}"]["parameters"] for stage in (1, 2)] == [748, 748]
        assert held["stage 3"]["parameters"] == 376  # half, rounded up tensor by tensor
        for way in WAYS:
            assert 3 * 748 / 2 <= held[way]["optimizer"] <= 3 * 748 / 2 + 32, way


# ------------------------------------------------------------------------------------------------------ stop and resume
def stops_and_goes_on(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, given in {**WAYS, **HALVES}.items():
        whole = awkward(f"{folder}/{name}/whole", ROWS, **given)
        awkward(f"{folder}/{name}/cut", ROWS, stop=3, **given)
        found[name] = whole, awkward(f"{folder}/{name}/cut", ROWS, resume=True, **given)
    return found


def test_resuming_is_exact(tmp_path: Path) -> None:
    """Two groups, frozen, unused and tied parameters, buffers; dropout; in fp32 and bf16, offloaded or not."""
    ranks = run_distributed(stops_and_goes_on, 2, str(tmp_path), timeout_s=150)
    for rank in ranks:
        for name, (whole, resumed) in rank.items():
            try:
                assert_equal(whole, resumed)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
    kept = ranks[0]["stage 3"][0]["tensors"]
    assert {"model/frozen.weight", "model/seen", "optimizer/first.weight/exp_avg"} <= kept.keys()
    whole = [name for name, value in ranks[1]["stage 3"][0]["tensors"].items() if value.ndim]
    assert not whole, "a rank that writes nothing holds nothing whole"
    written = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert {"model.safetensors", "optimizer.safetensors"} <= set(written)
    assert not [name for name in written if not name.endswith((".json", ".safetensors"))], (
        "nothing else, nothing pickled"
    )


MOVES = {
    "stage 2 to replicas": ("stage 2", "replicas"),
    "replicas to stage 3": ("replicas", "stage 3"),
    "replicas to stage 1": ("replicas", "stage 1"),
    "stage 3 to stage 1": ("stage 3", "stage 1"),
    "stage 1 to stage 3, offloaded": ("stage 1", "stage 3, offloaded"),
    "stage 3 to one process": ("stage 3", None),
    "stage 2 to one process": ("stage 2", None),
    "one process to stage 3": (None, "stage 3"),
    "fsdp to stage 3": ("fsdp", "stage 3"),
    "stage 3 to fsdp": ("stage 3", "fsdp"),
}


def moves(folder: str) -> dict[str, Any]:
    """Stop at step 3 in one way, go on in another; what one process begins or ends is left to `alone`."""
    ways = {**WAYS, "replicas": {}, "fsdp": {"fsdp": "full_shard"}}
    found: dict[str, Any] = {}
    for name, (first, then) in MOVES.items():
        if first:
            awkward(f"{folder}/{name}", ROWS, stop=3, dropout=0.0, **ways[first])
        if then:
            found[name] = awkward(f"{folder}/{name}", ROWS, resume=True, dropout=0.0, **ways[then])
    return found


def alone(folder: str) -> dict[str, Any]:
    """One process: stage 3 divides among one."""
    given = {"dropout": 0.0, **WAYS["stage 3"]}
    return {
        "never stopped": awkward(f"{folder}/alone", ROWS, **given),
        "stage 3 to one process": awkward(f"{folder}/stage 3 to one process", ROWS, resume=True, **given),
    }


def test_it_goes_on_in_another_way(tmp_path: Path) -> None:
    """Other stages, replicas, another number of processes: the same samples, losses and state as if never stopped."""
    folder = str(tmp_path)
    whole = awkward(f"{folder}/whole", ROWS, dropout=0.0)
    awkward(f"{folder}/one process to stage 3", ROWS, stop=3, dropout=0.0)
    found = run_distributed(moves, 2, folder, timeout_s=150)[0]
    found |= run_distributed(alone, 1, folder)[0]
    found["stage 2 to one process"] = awkward(f"{folder}/stage 2 to one process", ROWS, resume=True, dropout=0.0)
    assert found.keys() == {*MOVES, "never stopped"}
    for name, run in found.items():
        assert run["position"] == whole["position"], name
        for mine, theirs in zip(whole["logs"], run["logs"], strict=True):
            assert mine.get("loss", 0.0) == pytest.approx(theirs.get("loss", 0.0), rel=1e-6), name
            for key in mine.keys() - {"total_flos"}:  # dummy batches are work, too
                assert mine[key] == pytest.approx(theirs[key], rel=2e-5, abs=1e-7), (name, key)
        for key, value in whole["tensors"].items():
            # What nobody uses is left alone by torch's optimizers; under ZeRO it decays, with a gradient of zero. The
            # buffer is of what the first process saw.
            if "/unused" not in key and key != "model/seen" and not key.endswith("/step"):
                np.testing.assert_allclose(run["tensors"][key], value, rtol=1e-4, atol=3e-6, err_msg=f"{name}: {key}")
