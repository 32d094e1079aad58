"""In fresh interpreters: what an import, a check or a call does not import, accelerate's state, calls of a step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_lib
from benchmarks.step_overhead import MOST_CALLS, by_trainer, count_calls
from tests.support.command import python
from tests.support.distributed import run_distributed
from tests.support.toy import project
from tests.support.toys import classification_rows
from tests.support.training import trainer
from trainer_lib import TrainingArguments
from trainer_lib.arguments.validation import REPORTERS

ROWS = classification_rows(12)
#: What lives on a floor that imports torch; everything else must come without it.
WITH_TORCH = {
    *("Trainer", "set_seed", "enable_full_determinism", "default_data_collator"),
    *(name for name in trainer_lib.__all__ if "DataCollator" in name),
    *(row.callback for row in REPORTERS.values() if not row.is_ours),
    *("LoadedModel", "Seq2SeqTrainer", "TFTrainer", "load_model"),
    *("default_compute_objective", "default_hp_space_optuna", "default_hp_space_ray"),
}


def printed(code: str) -> list[str]:
    return python("-W", "ignore", "-c", code).stdout.splitlines()


def test_what_needs_no_torch_comes_without_it_and_the_trainer_without_what_few_trainings_need() -> None:
    few = "('torch.distributed.tensor', 'sympy', 'deepspeed', 'transformers', 'peft', 'datasets', 'optuna', 'keras')"
    names = sorted(set(trainer_lib.__all__) - WITH_TORCH)
    code = (
        f"import sys, trainer_lib, trainer_lib.worker.prepare\nfor name in {names}: getattr(trainer_lib, name)\n"
        "trainer_lib.TrainingArguments(output_dir='x', deepspeed={'zero_optimization': {'stage': 3}})\n"
        "print({'torch', 'deepspeed'} & set(sys.modules))\n"
        f"from trainer_lib import TFTrainer, Trainer\nprint([name for name in {few} if name in sys.modules])"
    )
    assert printed(code) == ["set()", "[]"]


def test_a_bad_spec_is_refused_before_prefect_mlflow_or_torch_is_imported(tmp_path: Path) -> None:
    """And the flow's parameters are serialized without fastapi."""
    code = (
        "import sys\n"
        "from trainflow.flows.spec.spec import load_spec\n"
        f"spec = {str(project(tmp_path / 'project'))!r}\n"
        "load_spec(spec)\n"
        "try:\n"
        "    load_spec(spec, ['train.args.lerning_rate=1'])\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "print(sorted({'prefect', 'mlflow', 'torch', 'pyarrow', 'numpy'} & set(sys.modules)))\n"
        "from trainflow.flows.pipeline import pipeline\n"
        "assert pipeline.serialize_parameters({'debug': True}) == {'debug': True}\n"
        "print('fastapi' in sys.modules)"
    )
    message, modules, fastapi = printed(code)
    assert "learning_rate" in message
    assert (modules, fastapi) == ("[]", "False")


def test_every_public_name_resolves_and_an_unknown_one_is_an_attribute_error() -> None:
    for name in trainer_lib.__all__:
        assert getattr(trainer_lib, name).__module__.startswith(("trainer_lib.", "transformers.")), name
        assert name in dir(trainer_lib)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = trainer_lib.Trainr  # type: ignore[attr-defined]


def comes_with_accelerate_late(folder: str) -> None:
    del os.environ["LOCAL_RANK"]  # as where no launcher started it
    one = trainer(folder, ROWS, max_steps=1, eval_dataset=ROWS)
    one.train()
    one.evaluate()
    one.predict(ROWS)
    assert "accelerate" not in sys.modules
    from accelerate.logging import get_logger
    from accelerate.state import PartialState

    class Config(TrainingArguments): ...

    Config("out", use_cpu=True)
    get_logger("library").warning("as TRL writes in __init__")
    state = PartialState()
    assert (state.num_processes, state.is_main_process, state.device.type) == (1, True, "cpu")
    PartialState._shared_state["device"] = "kept"
    Config("out", use_cpu=True)
    assert PartialState().device == "kept"


def test_accelerate_is_not_imported_without_need_and_its_state_is_filled_in_or_left(tmp_path: Path) -> None:
    run_distributed(comes_with_accelerate_late, 1, str(tmp_path))


def plain() -> list[list[str]]:
    import accelerate
    from accelerate import state as states

    del os.environ["LOCAL_RANK"]
    found = vars(accelerate.Accelerator(cpu=True))
    return [*map(sorted, (found, states.PartialState._shared_state, states.AcceleratorState._shared_state))]


def test_the_accelerator_has_the_attributes_that_accelerates_constructor_sets(tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState, PartialState

    [(names, partial, whole)] = run_distributed(plain, 1)
    AcceleratorState._reset_state(reset_partial_state=True)
    helper = trainer(tmp_path, ROWS).accelerator
    assert not [name for name in names if not hasattr(helper, name)]
    assert sorted(PartialState._shared_state) == partial
    ours = {"_trainflow_filled", "fsdp_plugin"}  # the second: None instead of an AttributeError
    assert sorted(AcceleratorState._shared_state.keys() - ours) == whole
    assert helper.state.fsdp_plugin is helper.state.deepspeed_plugin is helper.deepspeed_plugin is None
    facts: dict[str, Any] = {"split_batches": False, "dispatch_batches": False, "even_batches": True}
    facts |= {"use_seedable_sampler": True, "non_blocking": True, "use_stateful_dataloader": False}
    facts |= {"project_dir": str(tmp_path), "save_iteration": 0, "logging_dir": str(tmp_path)}
    facts |= {"parallelism_config": None, "torch_device_mesh": None, "native_amp": False, "should_save_model": True}
    facts |= {"fp8_backend": "NO", "is_composable_parallelism_enabled": False, "distributed_type": "NO"}
    facts |= {"num_processes": 1, "process_index": 0, "local_process_index": 0}
    assert {name: getattr(helper, name) for name in facts} == facts
    with pytest.raises(ValueError, match="LOMO"):
        helper.lomo_backward(torch.ones(()), 0.1)  # no such optimizer was prepared


def counted() -> list[dict[str, float]]:
    return [count_calls(by_trainer, 1) for _ in range(2)]


def test_a_step_makes_few_calls_and_the_same_number_on_every_run() -> None:
    # On a forked rank: once any model was compiled, torch wraps the optimizers of a process in calls of its own.
    [(first, second)] = run_distributed(counted, 1)
    assert first["all"] <= MOST_CALLS
    assert second == first
