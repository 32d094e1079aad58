"""Every public member of accelerate's Accelerator is served, inherited or refused by name; nothing in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("name", WITHOUT)
def test_a_member_that_is_refused_names_the_way_out(name: str, tmp_path: Path) -> None:
    helper = trainer(tmp_path, ROWS).accelerator
    with pytest.raises(ConfigError) as caught:
        getattr(helper, name)()
    assert caught.value.field == f"accelerator.{name}" and caught.value.remedy == REFUSED[name]
