"""Every public member of accelerate's Accelerator is served, inherited or refused by name; nothing in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.interpreter import run_python
from tests.support.toys import classification_rows
from tests.support.training import trainer
from trainer_lib.errors import ConfigError
from trainer_lib.trainer.accelerator.trainer_accelerator import REFUSED, TrainerAccelerator

accelerate: Any = pytest.importorskip("accelerate")

ROWS = classification_rows(12)
#: Public members whose own code, in accelerate, asks only for what the Trainer has filled in.
INHERITED = {
    *("deepspeed_plugin", "multi_device", "distributed_type", "num_processes", "process_index", "device"),
    *("local_process_index", "is_last_process", "is_fsdp2", "is_composable_parallelism_enabled"),
    *("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"),
    *("use_stateful_dataloader", "project_dir", "logging_dir", "save_iteration", "parallelism_config"),
    *("torch_device_mesh", "sync_gradients", "gradient_accumulation_steps", "split_between_processes"),
    *("on_main_process", "on_local_main_process", "on_last_process", "on_process", "on_local_process"),
    *("trigger_sync_in_backward", "join_uneven_inputs", "print", "set_trigger", "check_trigger", "init_trackers"),
    *("save", "free_memory", "clear", "maybe_context_parallel", "profile", "skip_first_batches"),
    *("verify_device_map", "lomo_backward"),
}


#: What this Trainer has no counterpart of.
WITHOUT = (
    *("save_state", "load_state", "register_for_checkpointing", "register_save_state_pre_hook"),
    *("register_load_state_pre_hook", "deepspeed_ulysses_dl_adapter", "tensor_parallel_rank", "data_parallel_rank"),
    *("pipeline_parallel_rank", "context_parallel_rank", "data_parallel_shard_rank"),
)


def _public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_every_public_member_of_accelerates_is_served_inherited_or_refused() -> None:
    theirs = _public(dir(accelerate.Accelerator))
    own = {name for cls in TrainerAccelerator.__mro__ if "trainer_lib" in cls.__module__ for name in _public(vars(cls))}
    served = own & theirs - REFUSED.keys()
    assert served | INHERITED | REFUSED.keys() == theirs and REFUSED.keys() == set(WITHOUT)
    assert not served & INHERITED and not INHERITED & REFUSED.keys()


def test_the_accelerator_has_the_attributes_that_accelerates_constructor_sets(tmp_path: Path) -> None:
    plain = "import accelerate; print(*sorted(vars(accelerate.Accelerator(cpu=True))))"
    names = run_python(plain).split()
    helper = trainer(tmp_path, ROWS).accelerator
    assert not [name for name in names if not hasattr(helper, name)]
    facts: dict[str, Any] = {
        "split_batches": False,
        "dispatch_batches": False,
        "even_batches": True,
        "use_seedable_sampler": True,
        "non_blocking": True,
        "use_stateful_dataloader": False,
        "project_dir": str(tmp_path),
        "save_iteration": 0,
        "logging_dir": str(tmp_path),
        "parallelism_config": None,
        "torch_device_mesh": None,
        "native_amp": False,
        "should_save_model": True,
        "fp8_backend": "NO",
        "is_composable_parallelism_enabled": False,
        "distributed_type": "NO",
        "num_processes": 1,
        "process_index": 0,
        "local_process_index": 0,
    }
    assert {name: getattr(helper, name) for name in facts} == facts
    with pytest.raises(ValueError, match="LOMO"):
        helper.lomo_backward(torch.ones(()), 0.1)  # no such optimizer was prepared


@pytest.mark.parametrize("name", WITHOUT)
def test_a_member_that_is_refused_names_the_way_out(name: str, tmp_path: Path) -> None:
    helper = trainer(tmp_path, ROWS).accelerator
    with pytest.raises(ConfigError) as caught:
        getattr(helper, name)()
    assert caught.value.field == f"accelerator.{name}" and caught.value.remedy == REFUSED[name]


def test_the_state_that_is_filled_in_has_the_entries_that_accelerate_fills_in(tmp_path: Path) -> None:
    plain = (
        "import accelerate, accelerate.state as s; accelerate.Accelerator(cpu=True);"
        "print(*sorted(s.PartialState._shared_state)); print(*sorted(s.AcceleratorState._shared_state))"
    )
    partial, whole = (line.split() for line in run_python(plain).splitlines())
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    helper = trainer(tmp_path, ROWS).accelerator
    assert sorted(PartialState._shared_state) == partial
    ours = {"_trainflow_filled", "fsdp_plugin"}  # the second: None instead of an AttributeError
    assert sorted(AcceleratorState._shared_state.keys() - ours) == whole
    assert helper.state.fsdp_plugin is helper.state.deepspeed_plugin is helper.deepspeed_plugin is None
