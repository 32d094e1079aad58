"""Files of torch.save and folders of other programs made to do harm: the import refuses them, and runs nothing."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hostile import Evil, bounded, program_of, rezipped, saved
from tests.support.imported import import_here
from trainer_lib.checkpoint.foreign.torch_files import read_torch_file
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.storage import Store
from trainer_lib.worker.foreign_model import from_config


# ---------------------------------------------------------------------------------------------- files of torch.save
def torch_file(tmp_path: Path, data: bytes) -> Any:
    (tmp_path / "file.pt").write_bytes(data)
    return read_torch_file(Store.open(tmp_path), "file.pt")


def test_a_malicious_pickle_is_named_and_not_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    data = saved({"state": {}, "param_groups": [Evil(touched)]})
    torch.load(io.BytesIO(data), weights_only=False)
    assert touched.exists(), "the pickle is harmless, and proves nothing"
    touched.unlink()
    with pytest.raises(DamagedError, match=r"posix\.system") as caught:
        torch_file(tmp_path, data)
    assert not touched.exists()
    assert "trust" in str(caught.value.remedy)


def laughs() -> bytes:
    value: Any = [1] * 10
    for _ in range(40):
        value = [value, value]
    return saved(value)


def deep() -> bytes:
    value: Any = []
    for _ in range(200):
        value = [value]
    return saved(value)


PROGRAMS: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "not a ZIP"),
    "no archive": (lambda: b"\x80\x02}q\x00.", "not a ZIP"),
    "compressed": (lambda: rezipped(saved({"a": torch.zeros(10**6)}), compression=zipfile.ZIP_DEFLATED), "compressed"),
    "two programs": (lambda: rezipped(saved({}), more="x/data.pkl"), "records"),
    "big-endian": (lambda: rezipped(saved({})).replace(b"little", b"bigend"), "cannot be read|big-endian"),
    "a builtin": (lambda: rezipped(saved({}), b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R."), "builtins.eval"),
    "a name from the stack": (lambda: rezipped(saved({}), b"\x80\x04\x8c\x02os\x8c\x06system\x93."), "STACK_GLOBAL"),
    "an old instance": (lambda: rezipped(saved({}), b"(ios\nsystem\n."), "INST"),
    "a file by its number": (lambda: rezipped(saved({}), b"\x80\x02\x82\x01."), "EXT1"),
    "no end": (lambda: rezipped(saved({}), b"\x80\x02}"), "cannot be read|no end"),
    "an empty stack": (lambda: rezipped(saved({}), b"\x80\x02."), "cannot be read"),
    "a mark that is not there": (lambda: rezipped(saved({}), b"\x80\x02t."), "cannot be read"),
    "a storage too small": (
        lambda: rezipped(saved({"a": torch.arange(4.0)}), program_of(saved({"a": torch.arange(4.0)})).replace(
            b"K\x04tq", b"K\xc8tq")), "a storage has 16 bytes"),
    "a tensor beyond its bytes": (
        lambda: rezipped(saved({"a": torch.arange(4.0)}), program_of(saved({"a": torch.arange(4.0)})).replace(
            b"K\x04\x85", b"M\xff\xff\x85")), "larger than its bytes"),
    "a tensor of a terabyte": (lambda: saved({"a": torch.zeros(1).expand(2**38)}), "larger than its bytes"),
    "an object": (lambda: saved({"a": torch.Generator}), "would import 'torch._C.Generator'"),
    "a set": (lambda: saved({"a": {1, 2}}), "set"),
    "a billion laughs": (laughs, "more than"),
    "too deep": (deep, "deeper"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_file_that_torch_would_not_write_is_refused(kind: str, tmp_path: Path) -> None:
    make, reason = PROGRAMS[kind]
    data = make()
    with bounded(300), pytest.raises(DamagedError, match=reason) as caught:
        torch_file(tmp_path, data)
    assert str(caught.value.field).endswith("file.pt")


def test_what_torch_writes_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64):
        value = {"whole": base.to(dtype), "view": base.to(dtype).t()[1:], "none": torch.empty(0, 3, dtype=dtype)}
        found = torch_file(
            tmp_path, saved({**value, "list": [1, 2.5, None, True, "x", (3, 2**70)], 7: torch.Size([2])})
        )
        assert all(torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in value.items())
        assert found["list"] == [1, 2.5, None, True, "x", (3, 2**70)]
        assert found[7] == (2,)


# -------------------------------------------------------------------------------------------------- importing folders
@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a Trainer of transformers writes, put together by hand: nothing here needs one."""
    folder = tmp_path_factory.mktemp("peers") / "checkpoint-2"
    folder.mkdir()
    weights = {"a": torch.randn(2, 3), "b": torch.randn(4)}
    (folder / "pytorch_model.bin").write_bytes(saved(weights))
    state = {number: {"step": torch.tensor(2.0), "exp_avg": tensor} for number, tensor in enumerate(weights.values())}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}
    (folder / "optimizer.pt").write_bytes(saved({"state": state, "param_groups": [group]}))
    (folder / "scheduler.pt").write_bytes(saved({"last_epoch": 2, "base_lrs": [0.1], "lr_lambdas": [{}]}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "epoch": 0.5, "log_history": []}))
    (folder / "training_args.bin").write_bytes(b"never opened")
    return folder


def test_the_arguments_are_never_opened(peers: Path, tmp_path: Path) -> None:
    source = copied(peers, tmp_path)
    (source / "training_args.bin").unlink()
    os.mkfifo(source / "training_args.bin")
    with pytest.raises(DamagedError, match="A link or a pipe"):
        import_here(source, tmp_path / "out")
    (source / "training_args.bin").unlink()
    touched = tmp_path / "touched"
    (source / "training_args.bin").write_bytes(saved(Evil(touched)))
    (source / "modeling.py").write_text(f"open({str(touched)!r}, 'w')")
    told = import_here(source, tmp_path / "out")
    assert told.left_out == ("modeling.py", "training_args.bin")
    assert not touched.exists()


def copied(peers: Path, tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for file in peers.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    return source


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "pytorch_model.bin"])
def test_a_malicious_file_stops_the_import_and_is_not_run(name: str, peers: Path, tmp_path: Path) -> None:
    source, touched = copied(peers, tmp_path), tmp_path / "touched"
    (source / name).write_bytes(saved({"state": Evil(touched)}))
    with pytest.raises(DamagedError, match=r"posix\.system") as caught:
        import_here(source, tmp_path / "out")
    assert str(caught.value.field).endswith(name)
    assert not touched.exists()
    assert not (tmp_path / "out").exists()


CHANGES: dict[str, tuple[str, Any, str]] = {
    "a step that is text": ("trainer_state.json", {"global_step": "2"}, "whole number"),
    "an endless epoch": ("trainer_state.json", {"global_step": 2, "epoch": float("inf")}, "finite number"),
    "a log of numbers": ("trainer_state.json", {"global_step": 2, "epoch": 0.5, "log_history": [1]}, "list of entries"),
    "no optimizer": ("optimizer.pt", {"a": 1}, "not hold an optimizer's state"),
    "numbers that repeat": ("optimizer.pt", {"state": {}, "param_groups": [{"params": [0, 0]}]}, "from 0 on"),
    "numbers that are text": ("optimizer.pt", {"state": {}, "param_groups": [{"params": ["a"]}]}, "from 0 on"),
    "a group without members": ("optimizer.pt", {"state": {}, "param_groups": [{}]}, "lists no parameters"),
    "state by name": ("optimizer.pt", {"state": {"a": {}}, "param_groups": [{"params": [0]}]}, "by parameter"),
    "a list": ("scheduler.pt", [1], "not hold a dictionary"),
    "no random states": ("rng_state.pth", {"python": 1}, "not hold random states"),
    "weights that are numbers": ("pytorch_model.bin", {"a": 1}, "more than tensors"),
    "deep": ("trainer_state.json", b"[" * 10**5, "not JSON"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_file_of_another_shape_stops_the_import(kind: str, peers: Path, tmp_path: Path) -> None:
    name, value, reason = CHANGES[kind]
    source = copied(peers, tmp_path)
    is_json = name.endswith(".json")
    data = value if isinstance(value, bytes) else json.dumps(value).encode() if is_json else saved(value)
    (source / name).write_bytes(data)
    with bounded(200), pytest.raises(DamagedError, match=reason) as caught:
        import_here(source, tmp_path / "out")
    assert name in str(caught.value.field)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "../outside.safetensors"}, "not in the folder"),
        ({"a": "/etc/passwd"}, "not in the folder"),
        ({"a": "absent.safetensors"}, "not in the folder"),
        ({"a": 5}, "not in the folder"),
        ({"a": ["one.bin"]}, "not in the folder"),
        ({"a": "one.bin", "b": "one.bin", "c": "one.bin"}, "no file holds 'c'"),
        ({"a": "one.bin"}, "elsewhere"),
        ([], "not hold a dictionary"),
    ],
)
def test_an_index_that_leads_elsewhere_stops_the_import(
    weight_map: Any, reason: str, peers: Path, tmp_path: Path
) -> None:
    source = copied(peers, tmp_path)
    (source / "pytorch_model.bin").rename(source / "one.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DamagedError, match=reason):
        import_here(source, tmp_path / "out")


def test_a_link_in_the_folder_stops_the_import(peers: Path, tmp_path: Path) -> None:
    source = copied(peers, tmp_path)
    (source / "optimizer.pt").rename(tmp_path / "optimizer.pt")
    (source / "optimizer.pt").symlink_to(tmp_path / "optimizer.pt")
    with pytest.raises(DamagedError, match="A link or a pipe stands where a file is expected"):
        import_here(source, tmp_path / "out")


def test_a_configuration_runs_nothing_and_builds_nothing_absurd(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (tmp_path / "modeling.py").write_text(f"open({str(touched)!r}, 'w')")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config: dict[str, Any] = {
        **small,
        "vocab_size": 9,
        "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling.Anything"},
        "_attn_implementation": "somebody/kernels",
        "attn_implementation": "somebody/kernels",
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    }
    model = from_config(config, 12)
    assert model is not None
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not touched.exists()
    for change in ({"num_hidden_layers": 10**9}, {"hidden_size": "many"}, {"num_attention_heads": 0}):
        with bounded(300), pytest.raises(ConfigError, match="cannot be built"):
            from_config({**config, **change}, 12)
    for name in ("pipeline", "Trainer", "../x", "AutoModel", "", 5, None):
        assert from_config({**config, "architectures": [name]}, 12) is None
