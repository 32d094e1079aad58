"""`trainer.accelerator` in fresh interpreters: imports, accelerate's own state, compiled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.interpreter import run_python
from tests.support.toys import classification_rows
from tests.support.training import trainer

accelerate: Any = pytest.importorskip("accelerate")

ROWS = classification_rows(12)


def test_accelerate_is_not_imported_without_need_and_its_state_is_filled_in_or_left(tmp_path: Path) -> None:
    run_python(
        "import sys; from tests.support.training import trainer; from tests.support.toys import classification_rows\n"
        "from trainer_lib import TrainingArguments\n"
        f"rows = classification_rows(4); one = trainer({str(tmp_path)!r}, rows, max_steps=1, eval_dataset=rows)\n"
        "one.train(); one.evaluate(); one.predict(rows)\n"
        "assert 'accelerate' not in sys.modules\n"
        "import accelerate.logging as logs; from accelerate.state import PartialState\n"
        "class Config(TrainingArguments): pass\n"
        "Config('out', use_cpu=True); logs.get_logger('library').warning('as TRL writes in __init__')\n"
        "state = PartialState()\n"
        "assert (state.num_processes, state.is_main_process, state.device.type) == (1, True, 'cpu')\n"
        "PartialState._shared_state['device'] = 'kept'; Config('out', use_cpu=True)\n"
        "assert PartialState().device == 'kept'"
    )


def test_unwrap_model_goes_through_the_wrapper_of_the_compiler(tmp_path: Path) -> None:
    # The compiler would change what every later step of this process calls.
    run_python(
        "import torch, peft; from torch import nn; from tests.support.training import trainer\n"
        "compiled = lambda model: torch.compile(model, backend='eager')\n"
        f"one = trainer({str(tmp_path)!r}, None)\n"
        "unwrap_model, model = one.accelerator.unwrap_model, compiled(one.model)\n"
        "assert unwrap_model(model) is unwrap_model(nn.DataParallel(model)) is one.model\n"
        "assert unwrap_model(model, keep_torch_compile=True) is model\n"
        "adapted = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(target_modules=['0']))\n"
        "assert unwrap_model(compiled(adapted)) is unwrap_model(adapted) is adapted\n"
    )


PLAIN = """
import accelerate, accelerate.state as states
print(*sorted(vars(accelerate.Accelerator(cpu=True))))
print(*sorted(states.PartialState._shared_state))
print(*sorted(states.AcceleratorState._shared_state))
"""


def test_the_accelerator_has_the_attributes_that_accelerates_constructor_sets(tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState, PartialState

    names, partial, whole = (line.split() for line in run_python(PLAIN).splitlines())
    AcceleratorState._reset_state(reset_partial_state=True)
    helper = trainer(tmp_path, ROWS).accelerator
    assert not [name for name in names if not hasattr(helper, name)]
    assert sorted(PartialState._shared_state) == partial
    ours = {"_trainflow_filled", "fsdp_plugin"}  # the second: None instead of an AttributeError
    assert sorted(AcceleratorState._shared_state.keys() - ours) == whole
    assert helper.state.fsdp_plugin is helper.state.deepspeed_plugin is helper.deepspeed_plugin is None
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
