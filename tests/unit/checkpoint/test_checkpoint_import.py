"""A checkpoint of the transformers Trainer goes on with ours as it would have gone on with theirs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.imported import SETTINGS, import_here, losses, peer_run
from tests.support.tiny_models import bert, llama, lm_rows, text_rows
from tests.support.training import trainer
from trainer_lib.checkpoint.catalogue import get_last_checkpoint
from trainer_lib.checkpoint.foreign.parameters import Slot, derive_names
from trainer_lib.checkpoint.foreign.source import derive_position
from trainer_lib.checkpoint.reader import load_checkpoint
from trainer_lib.commit import read_commit, verify_files
from trainer_lib.distributed import SingleProcess
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.state import TrainerState
from trainer_lib.storage import Store

STEPS = 12
QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BUILT: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": STEPS, "save_steps": 3}


MODEL = "from tests.unit.checkpoint.test_checkpoint_import import Layers\ndef build():\n    return Layers({depth})\n"


def classifier(seed: int = 0) -> Any:
    made = bert(seed=seed, **QUIET)
    made.accepts_loss_kwargs = False  # its loss is a mean and ignores the count, which the peer has to be told
    return made


class Layers(nn.Module):
    """Layers of different shapes, which tell its parameters apart; or of equal ones, which do not."""

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


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, peer_run(folder, llama(), lm_rows(40), **BUILT)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("small")
    return folder, peer_run(folder, layers(), points(), **BUILT)


def go_on(folder: Path, model: Any, rows: list[Any], **more: Any) -> Any:
    one = trainer(folder, rows, model=model, **{**SETTINGS, **BUILT, "save_strategy": "no", **more})
    one.train(resume_from_checkpoint=True)
    return one


def same(ours: Any, peer: Any) -> None:
    """The same losses to 2e-6, and the same weights."""
    assert losses(ours) == pytest.approx(losses(peer), rel=2e-6)
    assert len(losses(ours)) == STEPS
    expected = peer.model.state_dict()
    for name, value in ours.model.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-7), name


# --------------------------------------------------------------------------------------------------------- going on
@pytest.mark.parametrize("step", [3, 6, 9])
def test_a_language_model_goes_on_as_with_transformers(
    step: int, language_model: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, peer = language_model
    told = import_here(folder / f"checkpoint-{step}", tmp_path)
    assert (told.step, told.parameters, told.left_out) == (step, 21, ("training_args.bin",))
    assert get_last_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{step}")
    same(go_on(tmp_path, llama(seed=5), lm_rows(40)), peer)


def test_a_classifier_goes_on_as_with_transformers(tmp_path: Path) -> None:
    peer = peer_run(tmp_path / "peer", classifier(), text_rows(40), **BUILT)
    import_here(tmp_path / "peer" / "checkpoint-6", tmp_path / "ours")
    same(go_on(tmp_path / "ours", classifier(seed=5), text_rows(40)), peer)


def test_the_imported_checkpoint_is_whole_and_says_where_it_came_from(
    language_model: tuple[Path, Any], tmp_path: Path
) -> None:
    source = language_model[0] / "checkpoint-6"
    import_here(source, tmp_path)
    store = Store.open(tmp_path / "checkpoint-6")
    commit = read_commit(store, kind="checkpoint")
    assert commit is not None
    assert verify_files(store, commit) == []
    assert commit.meta["imported_from"] == str(source)
    loaded = load_checkpoint(Store.open(tmp_path), "checkpoint-6", SingleProcess())
    theirs = load_file(source / "model.safetensors")
    assert all(torch.equal(loaded.read_model()[name], value) for name, value in theirs.items())
    saved = torch.load(source / "optimizer.pt", weights_only=True)["state"]
    optimizer = loaded.read_optimizer()
    assert optimizer is not None
    assert len(optimizer.tensors) == 3 * len(saved)
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


# ----------------------------------------------------------------------------------- names without the model's class
def test_a_model_of_ones_own_is_told_by_its_shapes(small: tuple[Path, Any], tmp_path: Path) -> None:
    folder, peer = small
    import_here(folder / "checkpoint-6", tmp_path)
    same(go_on(tmp_path, Layers(), points()), peer)


def test_a_model_that_its_shapes_do_not_tell_is_asked_for(tmp_path: Path) -> None:
    peer = peer_run(tmp_path / "peer", layers(4), points(), **BUILT)
    source = tmp_path / "peer" / "checkpoint-6"
    with pytest.raises(ConfigError, match="several names of the weights fit one number") as caught:
        import_here(source, tmp_path / "ours")
    assert "--model FILE.py:FUNCTION" in str(caught.value.remedy)
    assert not (tmp_path / "ours").exists()

    file = tmp_path / "model.py"
    file.write_text(
        "from tests.unit.checkpoint.test_checkpoint_import import Layers\ndef build():\n    return Layers(4)\n"
    )
    import_here(source, tmp_path / "ours", f"{file}:build")
    same(go_on(tmp_path / "ours", Layers(4), points()), peer)
    for function, message in (("absent", "no function absent"), ("number", "must return a torch.nn.Module")):
        file.write_text("def number():\n    return 5\n")
        with pytest.raises(ConfigError, match=message):
            import_here(source, tmp_path / "other", f"{file}:{function}")
    file.write_text(
        "from tests.unit.checkpoint.test_checkpoint_import import Layers\ndef build():\n    return Layers(9)\n"
    )
    with pytest.raises(ConfigError, match="or other shapes"):
        import_here(source, tmp_path / "other", f"{file}:build")


def test_the_order_in_pytorch_model_bin_tells_equal_shapes_apart(tmp_path: Path) -> None:
    peer = peer_run(tmp_path / "peer", layers(4), points(), **BUILT)
    source = tmp_path / "peer" / "checkpoint-6"
    ordered = {name: load_file(source / "model.safetensors")[name] for name in layers(4).state_dict()}
    (source / "model.safetensors").unlink()
    torch.save(ordered, source / "pytorch_model.bin")
    import_here(source, tmp_path / "ours")
    same(go_on(tmp_path / "ours", Layers(4), points()), peer)


def test_names_are_dealt_in_order_or_not_at_all() -> None:
    weights = {name: torch.zeros(3) for name in ("a", "b.bias", "c", "d.bias")}

    def decays(name: str) -> bool:
        return "bias" not in name

    slots = [[Slot(0, (3,)), Slot(1, (3,))], [Slot(2, (3,)), Slot(3, (3,))]]
    assert derive_names(weights, slots, in_order=True, decays=decays) == [["a", "c"], ["b.bias", "d.bias"]]
    for in_order, places in ((False, slots), (True, [slots[0], slots[1][:1]]), (True, [[Slot(0, (4,))], []])):
        with pytest.raises(ConfigError, match="cannot be found"):
            derive_names(weights, places, in_order=in_order, decays=decays)


# ---------------------------------------------------------------------------------------------- other kinds of folder
def test_sharded_weights_are_taken_together(language_model: tuple[Path, Any], tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder, peer = language_model
    source = tmp_path / "source"
    shutil.copytree(folder / "checkpoint-6", source)
    LlamaForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="20KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    assert len(list(source.glob("model-*.safetensors"))) > 1
    import_here(source, tmp_path / "ours")
    same(go_on(tmp_path / "ours", llama(seed=5), lm_rows(40)), peer)


def test_tied_weights_are_tied_again(tmp_path: Path) -> None:
    peer = peer_run(tmp_path / "peer", llama(tie_word_embeddings=True), lm_rows(40), **BUILT)
    import_here(tmp_path / "peer" / "checkpoint-6", tmp_path / "ours")
    ours = go_on(tmp_path / "ours", llama(seed=5, tie_word_embeddings=True), lm_rows(40))
    assert ours.model.lm_head.weight is ours.model.model.embed_tokens.weight
    same(ours, peer)


def experts(seed: int = 0) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def test_experts_that_lie_apart_in_the_file_are_joined_again(tmp_path: Path) -> None:
    peer = peer_run(tmp_path / "peer", experts(), lm_rows(40), **BUILT)
    source = tmp_path / "peer" / "checkpoint-6"
    assert any("experts.0" in name for name in load_file(source / "model.safetensors"))
    import_here(source, tmp_path / "ours")
    same(go_on(tmp_path / "ours", experts(seed=5), lm_rows(40)), peer)


def test_weights_of_another_model_are_refused(language_model: tuple[Path, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(language_model[0] / "checkpoint-6", source)
    weights = load_file(source / "model.safetensors")
    first = next(iter(weights))
    for other in ({**weights, "other": torch.ones(2)}, {name: each for name, each in weights.items() if name != first}):
        save_file(other, source / "model.safetensors")
        with pytest.raises(ConfigError, match="not this model's") as caught:
            import_here(source, tmp_path / "ours")
        assert "--model" in str(caught.value.remedy)


ADAPTED = """
import sys
from tests.unit.checkpoint.test_checkpoint_import import adapted
def build():
    return adapted()
"""


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(llama(), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_goes_on_with_its_base(tmp_path: Path) -> None:
    peer = peer_run(tmp_path / "peer", adapted(), lm_rows(40), **BUILT)
    source = tmp_path / "peer" / "checkpoint-6"
    with pytest.raises(ConfigError, match="peft adapter"):
        import_here(source, tmp_path / "ours")
    file = tmp_path / "model.py"
    file.write_text(ADAPTED)
    import_here(source, tmp_path / "ours", f"{file}:build")
    same(go_on(tmp_path / "ours", adapted(), lm_rows(40)), peer)


def test_every_ranks_random_state_and_the_scaler_are_taken_over(small: tuple[Path, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(small[0] / "checkpoint-6", source)
    states = torch.load(source / "rng_state.pth", weights_only=False)
    (source / "rng_state.pth").unlink()
    for rank in range(3):
        torch.save({**states, "cpu": states["cpu"].roll(0), "python": (3, states["python"][1], float(rank))},
                   source / f"rng_state_{rank}.pth")  # fmt: skip
    torch.save({"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
                "_growth_tracker": 3}, source / "scaler.pt")  # fmt: skip
    import_here(source, tmp_path / "ours")
    loaded = load_checkpoint(Store.open(tmp_path / "ours"), "checkpoint-6", SingleProcess())
    assert loaded.world_size == 3
    assert [loaded.read_rng(rank)["python"][2] for rank in range(3)] == [0.0, 1.0, 2.0]
    assert loaded.scaler is not None
    assert loaded.scaler["_growth_tracker"] == 3


def test_a_folder_without_random_states_says_what_that_means(small: tuple[Path, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(small[0] / "checkpoint-6", source)
    (source / "rng_state.pth").unlink()
    told = import_here(source, tmp_path / "ours")
    assert any("no random states" in note for note in told.notes)
    same(go_on(tmp_path / "ours", Layers(), points()), small[1])


def test_what_is_there_already_is_not_overwritten(small: tuple[Path, Any], tmp_path: Path) -> None:
    import_here(small[0] / "checkpoint-6", tmp_path)
    with pytest.raises(ConfigError, match="step 6 already"):
        import_here(small[0] / "checkpoint-6", tmp_path)
    with pytest.raises(ConfigError, match="already a checkpoint of trainflow"):
        import_here(tmp_path / "checkpoint-6", tmp_path / "other")


def test_the_best_checkpoint_is_found_again_once_it_is_imported(small: tuple[Path, Any], tmp_path: Path) -> None:
    sources = {}
    for step in (3, 6):
        sources[step] = tmp_path / f"checkpoint-{step}"
        shutil.copytree(small[0] / f"checkpoint-{step}", sources[step])
        state = json.loads((sources[step] / "trainer_state.json").read_text())
        state |= {"best_global_step": 3, "best_metric": 0.5, "best_model_checkpoint": "/gone/checkpoint-3"}
        (sources[step] / "trainer_state.json").write_text(json.dumps(state))

    def best(name: str) -> Any:
        return load_checkpoint(Store.open(tmp_path / name), "checkpoint-6", SingleProcess()).trainer_state

    told = import_here(sources[6], tmp_path / "alone")
    assert any("that of step 3: import it first" in note for note in told.notes)
    assert best("alone")["best_model_checkpoint"] is None
    import_here(sources[3], tmp_path / "both")
    import_here(sources[6], tmp_path / "both")
    assert best("both")["best_model_checkpoint"] == str(tmp_path / "both" / "checkpoint-3")
