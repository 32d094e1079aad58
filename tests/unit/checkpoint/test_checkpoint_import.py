"""A checkpoint of the transformers Trainer goes on with ours as it would have gone on with theirs."""

from __future__ import annotations

import functools
import io
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.hostile import Evil, bounded, program_of, rezipped, saved
from tests.support.imported import SETTINGS, import_here, peer_run
from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.training import losses, trainer
from trainer_lib.checkpoint.catalogue import get_last_checkpoint
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.checkpoint.transformers_checkpoint import derive_position, read_torch_file
from trainer_lib.distributed.communicator import SingleProcess
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.state import TrainerState
from trainer_lib.storage import Store
from trainer_lib.storage.commit import read_commit, verify_files

STEPS = 12
BUILT: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": STEPS, "save_steps": 3}
MODEL = "from tests.unit.checkpoint.test_checkpoint_import import {0}\ndef build():\n    return {0}({1})\n"


def classifier(seed: int = 0) -> Any:
    made = bert(seed=seed, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    made.accepts_loss_kwargs = False  # its loss is a mean and ignores the count, which the peer has to be told
    return made


def pair() -> nn.Module:
    return nn.ParameterDict({"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4))})


class Layers(nn.Module):
    """A model that is not of transformers, with a buffer."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.second(self.first(x).tanh())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def layers(width: int = 5) -> Layers:
    torch.manual_seed(1)
    return Layers(width)


def points(count: int = 40) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(n % 4)} for n in range(count)]


def experts(seed: int = 0) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(llama(), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def tied(seed: int = 0) -> Any:
    return llama(seed=seed, tie_word_embeddings=True)


# How a model is built, with a seed or always alike, and its rows.
MODELS: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]]]] = {
    "llama": (llama, lambda: lm_rows(40)),
    "bert": (classifier, lambda: text_rows(40)),
    "layers": (lambda seed=1: layers(), points),
    "tied": (tied, lambda: lm_rows(40)),
    "experts": (experts, lambda: lm_rows(40)),
    "adapter": (lambda seed=0: adapted(), lambda: lm_rows(40)),
}
Peers = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Peers:
    """Train a model of `MODELS` with transformers, once; the folder of its checkpoints and its Trainer."""

    @functools.cache
    def train(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("peer")
        build, rows = MODELS[name]
        return folder, peer_run(folder, build(), rows(), **BUILT)

    return train


def copied(peers: Peers, name: str, tmp_path: Path, step: int = 6) -> Path:
    return Path(shutil.copytree(peers(name)[0] / f"checkpoint-{step}", tmp_path / "source"))


def built(folder: Path, name: str = "layers") -> str:
    """FILE.py:FUNCTION of a function of this file without arguments."""
    (folder / "model.py").write_text(MODEL.format(name, ""))
    return f"{folder / 'model.py'}:build"


def check_continues(folder: Path, peers: Peers, name: str) -> Any:
    """Continue what was imported: the same losses as the peer's to 2e-6, and the same weights."""
    build, rows = MODELS[name]
    ours = trainer(folder, rows(), model=build(seed=5), **{**SETTINGS, **BUILT, "save_strategy": "no"})
    ours.train(resume_from_checkpoint=True)
    peer = peers(name)[1]
    assert losses(ours) == pytest.approx(losses(peer), rel=2e-6) and len(losses(ours)) == STEPS
    expected = peer.model.state_dict()
    for name, value in ours.model.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-7), name
    return ours.model


# --------------------------------------------------------------------------------------------------------- going on
@pytest.mark.parametrize(
    ("name", "step"),
    [("llama", 3), ("llama", 6), ("llama", 9), ("bert", 6), ("layers", 6), ("tied", 6), ("experts", 6)],
)
def test_a_model_continues_as_with_transformers(name: str, step: int, peers: Peers, tmp_path: Path) -> None:
    """Also one that is not of transformers (layers), and experts that lie apart in the file."""
    source = peers(name)[0] / f"checkpoint-{step}"
    told = import_here(source, tmp_path, built(tmp_path, "classifier" if name == "bert" else name))
    assert (told.step, told.left_out) == (step, ("training_args.bin",))
    assert told.parameters == 21 or name != "llama"
    assert get_last_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{step}")
    assert any("experts.0" in key for key in load_file(source / "model.safetensors")) == (name == "experts")
    model = check_continues(tmp_path, peers, name)
    assert name != "tied" or model.lm_head.weight is model.model.embed_tokens.weight


def test_sharded_weights_are_taken_together(peers: Peers, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    source = copied(peers, "llama", tmp_path)
    LlamaForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="20KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    assert len(list(source.glob("model-*.safetensors"))) > 1
    import_here(source, tmp_path / "ours", built(tmp_path, "llama"))
    check_continues(tmp_path / "ours", peers, "llama")


def test_a_folder_without_random_states_says_what_that_means(peers: Peers, tmp_path: Path) -> None:
    source = copied(peers, "layers", tmp_path)
    (source / "rng_state.pth").unlink()
    assert any("no random states" in note for note in import_here(source, tmp_path / "ours", built(tmp_path)).notes)
    check_continues(tmp_path / "ours", peers, "layers")


def test_the_imported_checkpoint_is_whole_and_says_where_it_came_from(peers: Peers, tmp_path: Path) -> None:
    source = peers("llama")[0] / "checkpoint-6"
    import_here(source, tmp_path, built(tmp_path, "llama"))
    store = Store.open(tmp_path / "checkpoint-6")
    commit = read_commit(store, kind="checkpoint")
    assert commit is not None and verify_files(store, commit) == []
    assert commit.meta["imported_from"] == str(source)
    loaded = load_checkpoint(Store.open(tmp_path), "checkpoint-6", SingleProcess())
    theirs = load_file(source / "model.safetensors")
    assert all(torch.equal(loaded.read_model()[name], value) for name, value in theirs.items())
    saved = torch.load(source / "optimizer.pt", weights_only=True)["state"]
    optimizer = loaded.read_optimizer()
    assert optimizer is not None and len(optimizer.tensors) == 3 * len(saved)
    assert optimizer.groups[0]["params"][0] == "model.embed_tokens.weight"
    state = json.loads((source / "trainer_state.json").read_text())
    assert loaded.trainer_state["log_history"] == state["log_history"]
    rng = torch.load(source / "rng_state.pth", weights_only=False)
    assert loaded.read_rng(0)["python"] == [rng["python"][0], list(rng["python"][1]), rng["python"][2]]
    assert loaded.read_rng(0)["numpy"][1] == rng["numpy"][1].tolist()


@given(batches=st.integers(1, 60), accumulation=st.integers(1, 9), epoch=st.integers(0, 300), share=st.floats(0, 1))
def test_the_position_is_found_for_every_length_and_accumulation(
    batches: int, accumulation: int, epoch: int, share: float
) -> None:
    per_epoch = math.ceil(batches / accumulation)
    done = 1 + int(share * (per_epoch - 1))
    # As transformers counts: micro-batches done, over those of an epoch.
    state = TrainerState(
        global_step=epoch * per_epoch + done, epoch=epoch + min(done * accumulation, batches) / batches
    )
    found = derive_position(state)
    expected = (epoch + 1, 0) if done == per_epoch else (epoch, done)
    assert (found["epoch"], found["step_in_epoch"]) == expected or (
        epoch == 0 and done == per_epoch and (found["epoch"], found["step_in_epoch"]) == (1, 0)
    )


def test_a_position_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(DamagedError, match="cannot be at epoch"):
        derive_position(TrainerState(global_step=2, epoch=5.5))


# ------------------------------------------------------------------------------------------------- models and adapters
def test_a_function_that_returns_no_such_model_is_refused(peers: Peers, tmp_path: Path) -> None:
    source, file = peers("layers")[0] / "checkpoint-6", tmp_path / "model.py"
    for text, function, message in (
        ("", "absent", "no function absent"),
        ("def number():\n    return 5\n", "number", "must return a torch.nn.Module"),
        (MODEL.format("Layers", 9), "build", "of another shape"),
        (MODEL.format("layers", "").rstrip() + ".requires_grad_(False)", "build", "or other shapes"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            import_here(source, tmp_path / "other", f"{file}:{function}")
    assert not (tmp_path / "other").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_goes_on_with_its_base(peers: Peers, tmp_path: Path) -> None:
    source = peers("adapter")[0] / "checkpoint-6"
    with pytest.raises(ConfigError, match="peft adapter"):
        import_here(source, tmp_path / "ours", built(tmp_path, "llama"))
    import_here(source, tmp_path / "ours", built(tmp_path, "adapted"))
    check_continues(tmp_path / "ours", peers, "adapter")


def test_weights_of_another_model_are_refused(peers: Peers, tmp_path: Path) -> None:
    source = copied(peers, "llama", tmp_path)
    weights = load_file(source / "model.safetensors")
    first = next(iter(weights))
    for other in ({**weights, "other": torch.ones(2)}, {name: each for name, each in weights.items() if name != first}):
        save_file(other, source / "model.safetensors")
        with pytest.raises(ConfigError, match="not this model's") as caught:
            import_here(source, tmp_path / "ours", built(tmp_path, "llama"))
        assert "--model" in str(caught.value.remedy)


# ---------------------------------------------------------------------------------------------- what else it takes over
def test_every_ranks_random_state_and_the_scaler_are_taken_over(peers: Peers, tmp_path: Path) -> None:
    source = copied(peers, "layers", tmp_path)
    states = torch.load(source / "rng_state.pth", weights_only=False)
    (source / "rng_state.pth").unlink()
    for rank in range(3):
        torch.save({**states, "cpu": states["cpu"].roll(0), "python": (3, states["python"][1], float(rank))},
                   source / f"rng_state_{rank}.pth")  # fmt: skip
    torch.save({"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
                "_growth_tracker": 3}, source / "scaler.pt")  # fmt: skip
    import_here(source, tmp_path / "ours", built(tmp_path))
    loaded = load_checkpoint(Store.open(tmp_path / "ours"), "checkpoint-6", SingleProcess())
    assert loaded.world_size == 3 and [loaded.read_rng(rank)["python"][2] for rank in range(3)] == [0.0, 1.0, 2.0]
    assert loaded.scaler is not None and loaded.scaler["_growth_tracker"] == 3


def test_what_is_there_already_is_not_overwritten(peers: Peers, tmp_path: Path) -> None:
    import_here(peers("layers")[0] / "checkpoint-6", tmp_path, built(tmp_path))
    with pytest.raises(ConfigError, match="step 6 already"):
        import_here(peers("layers")[0] / "checkpoint-6", tmp_path, built(tmp_path))
    with pytest.raises(ConfigError, match="already a checkpoint of trainflow"):
        import_here(tmp_path / "checkpoint-6", tmp_path / "other", built(tmp_path))


def test_the_best_checkpoint_is_found_again_once_it_is_imported(peers: Peers, tmp_path: Path) -> None:
    sources = {}
    for step in (3, 6):
        sources[step] = tmp_path / f"checkpoint-{step}"
        shutil.copytree(peers("layers")[0] / f"checkpoint-{step}", sources[step])
        state = json.loads((sources[step] / "trainer_state.json").read_text())
        state |= {"best_global_step": 3, "best_metric": 0.5, "best_model_checkpoint": "/gone/checkpoint-3"}
        (sources[step] / "trainer_state.json").write_text(json.dumps(state))

    def best(name: str) -> Any:
        return load_checkpoint(Store.open(tmp_path / name), "checkpoint-6", SingleProcess()).trainer_state

    told = import_here(sources[6], tmp_path / "alone", built(tmp_path))
    assert any("that of step 3: import it first" in note for note in told.notes)
    assert best("alone")["best_model_checkpoint"] is None
    for source in sources.values():
        import_here(source, tmp_path / "both", built(tmp_path))
    assert best("both")["best_model_checkpoint"] == str(tmp_path / "both" / "checkpoint-3")


# ---------------------------------------------------------------------------------------------- files of torch.save
def torch_file(tmp_path: Path, data: bytes) -> Any:
    (tmp_path / "file.pt").write_bytes(data)
    return read_torch_file(Store.open(tmp_path), "file.pt")


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
    "a builtin": (lambda: rezipped(saved({}), b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R."), "import 'eval'"),
    "a name from the stack": (lambda: rezipped(saved({}), b"\x80\x04\x8c\x02os\x8c\x06system\x93."), "protocol 4"),
    "an old instance": (lambda: rezipped(saved({}), b"(ios\nsystem\n."), "Unsupported operand 105"),
    "a file by its number": (lambda: rezipped(saved({}), b"\x80\x02\x82\x01."), "Unsupported operand 130"),
    "no end": (lambda: rezipped(saved({}), b"\x80\x02}"), "cannot be read|no end"),
    "an empty stack": (lambda: rezipped(saved({}), b"\x80\x02."), "cannot be read"),
    "a mark that is not there": (lambda: rezipped(saved({}), b"\x80\x02t."), "cannot be read"),
    "a storage too small": (
        lambda: rezipped(saved({"a": torch.arange(4.0)}), program_of(saved({"a": torch.arange(4.0)})).replace(
            b"K\x04tq", b"K\xc8tq")), "16 bytes. does not match"),
    "a tensor beyond its bytes": (
        lambda: rezipped(saved({"a": torch.arange(4.0)}), program_of(saved({"a": torch.arange(4.0)})).replace(
            b"K\x04\x85", b"M\xff\xff\x85")), "not resizable"),
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
        assert found["list"] == [1, 2.5, None, True, "x", (3, 2**70)] and found[7] == (2,)


# -------------------------------------------------------------------------------------------------- importing folders
@pytest.fixture(scope="module")
def hand_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a Trainer of transformers, put together by hand: nothing here needs one."""
    folder = tmp_path_factory.mktemp("hand_made") / "checkpoint-2"
    folder.mkdir()
    weights = {"a": torch.randn(2, 3), "b": torch.randn(4)}
    save_file(weights, folder / "model.safetensors")
    state = {number: {"step": torch.tensor(2.0), "exp_avg": tensor} for number, tensor in enumerate(weights.values())}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}
    (folder / "optimizer.pt").write_bytes(saved({"state": state, "param_groups": [group]}))
    (folder / "scheduler.pt").write_bytes(saved({"last_epoch": 2, "base_lrs": [0.1], "lr_lambdas": [{}]}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "epoch": 0.5, "log_history": []}))
    for name in ("training_args.bin", "pytorch_model.bin"):
        (folder / name).write_bytes(b"never opened")
    return folder


def test_the_arguments_are_never_opened(hand_made: Path, tmp_path: Path) -> None:
    source = altered(hand_made, tmp_path)
    (source / "training_args.bin").unlink()
    os.mkfifo(source / "training_args.bin")
    with pytest.raises(DamagedError, match="A link or a pipe"):
        import_here(source, tmp_path / "out", built(tmp_path, "pair"))
    (source / "training_args.bin").unlink()
    touched = tmp_path / "touched"
    (source / "training_args.bin").write_bytes(saved(Evil(touched)))
    (source / "modeling.py").write_text(f"open({str(touched)!r}, 'w')")
    told = import_here(source, tmp_path / "out", built(tmp_path, "pair"))
    assert told.left_out == ("modeling.py", "pytorch_model.bin", "training_args.bin")
    assert not touched.exists()


def test_weights_in_a_pickle_are_refused_with_the_way_out(hand_made: Path, tmp_path: Path) -> None:
    source = altered(hand_made, tmp_path)
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no weights in safetensors.*pytorch_model\.bin.*save_pretrained"):
        import_here(source, tmp_path / "out", built(tmp_path, "pair"))


def altered(hand_made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hand_made, tmp_path / "source"))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"])
def test_a_malicious_file_stops_the_import_and_is_not_run(name: str, hand_made: Path, tmp_path: Path) -> None:
    source, touched = altered(hand_made, tmp_path), tmp_path / "touched"
    data = saved({"state": Evil(touched)})
    torch.load(io.BytesIO(data), weights_only=False)
    assert touched.exists(), "the pickle is harmless, and proves nothing"
    touched.unlink()
    (source / name).write_bytes(data)
    with pytest.raises(DamagedError, match=r"posix\.system") as caught:
        import_here(source, tmp_path / "out", built(tmp_path, "pair"))
    assert str(caught.value.field).endswith(name)
    assert "trust" in str(caught.value.remedy)
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
    "deep": ("trainer_state.json", b"[" * 10**5, "not JSON"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_file_of_another_shape_stops_the_import(kind: str, hand_made: Path, tmp_path: Path) -> None:
    name, value, reason = CHANGES[kind]
    source = altered(hand_made, tmp_path)
    is_json = name.endswith(".json")
    data = value if isinstance(value, bytes) else json.dumps(value).encode() if is_json else saved(value)
    (source / name).write_bytes(data)
    with bounded(200), pytest.raises(DamagedError, match=reason) as caught:
        import_here(source, tmp_path / "out", built(tmp_path, "pair"))
    assert name in str(caught.value.field)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "../outside.safetensors"}, "not in the folder"),
        ({"a": "/etc/passwd"}, "not in the folder"),
        ({"a": "absent.safetensors"}, "not in the folder"),
        ({"a": 5}, "not in the folder"),
        ({"a": "pytorch_model.bin"}, "not in the folder"),
        ({"a": ["one.safetensors"]}, "not in the folder"),
        (dict.fromkeys("abc", "one.safetensors"), "no file holds 'c'"),
        ({"a": "one.safetensors"}, "elsewhere"),
        ([], "not hold a dictionary"),
    ],
)
def test_an_index_that_leads_astray_is_refused(weight_map: Any, reason: str, hand_made: Path, tmp_path: Path) -> None:
    source = altered(hand_made, tmp_path)
    (source / "model.safetensors").rename(source / "one.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DamagedError, match=reason):
        import_here(source, tmp_path / "out", built(tmp_path, "pair"))


def test_a_link_in_the_folder_stops_the_import(hand_made: Path, tmp_path: Path) -> None:
    source = altered(hand_made, tmp_path)
    (source / "optimizer.pt").rename(tmp_path / "optimizer.pt")
    (source / "optimizer.pt").symlink_to(tmp_path / "optimizer.pt")
    with pytest.raises(DamagedError, match="A link or a pipe is in the place of a file"):
        import_here(source, tmp_path / "out", built(tmp_path, "pair"))
