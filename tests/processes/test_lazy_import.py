"""What an import, a check or a call does not import; and every public name of `trainer_lib` can be had."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trainer_lib
from tests.support.toy import project

#: What lives on a floor that imports torch; everything else must come without it.
WITH_TORCH = {
    *("Trainer", "set_seed", "enable_full_determinism", "default_data_collator"),
    *(name for name in trainer_lib.__all__ if "DataCollator" in name),
    *("LoadedModel", "Seq2SeqTrainer", "TFTrainer", "load_model"),
    *("default_compute_objective", "default_hp_space_optuna", "default_hp_space_ray"),
}


def _run(code: str, folder: Path) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    return result.stdout.strip()


def test_what_needs_no_torch_comes_without_it_and_the_trainer_without_what_few_trainings_need(tmp_path: Path) -> None:
    few = "('torch.distributed.tensor', 'sympy', 'deepspeed', 'transformers', 'peft', 'datasets', 'optuna', 'keras')"
    names = sorted(set(trainer_lib.__all__) - WITH_TORCH)
    code = (
        f"import sys, trainer_lib\nfor name in {names}: getattr(trainer_lib, name)\n"
        "trainer_lib.TrainingArguments(output_dir='x', deepspeed={'zero_optimization': {'stage': 3}})\n"
        "print({'torch', 'deepspeed'} & set(sys.modules))\n"
        f"from trainer_lib import TFTrainer, Trainer\nprint([name for name in {few} if name in sys.modules])"
    )
    assert _run(code, tmp_path).splitlines() == ["set()", "[]"]


def test_a_bad_spec_is_refused_before_prefect_mlflow_or_torch_is_imported(tmp_path: Path) -> None:
    """And the flow's parameters are serialized without fastapi."""
    code = (
        "import sys\n"
        "from flows.spec.spec import load_spec\n"
        f"spec = {str(project(tmp_path / 'project'))!r}\n"
        "load_spec(spec)\n"
        "try:\n"
        "    load_spec(spec, ['train.args.lerning_rate=1'])\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "print(sorted({'prefect', 'mlflow', 'torch', 'pyarrow', 'numpy'} & set(sys.modules)))\n"
        "from flows.pipeline import pipeline\n"
        "assert pipeline.serialize_parameters({'debug': True}) == {'debug': True}\n"
        "print('fastapi' in sys.modules)"
    )
    message, modules, fastapi = _run(code, tmp_path).splitlines()
    assert "learning_rate" in message
    assert (modules, fastapi) == ("[]", "False")


def test_every_public_name_resolves_and_an_unknown_one_is_an_attribute_error() -> None:
    for name in trainer_lib.__all__:
        assert getattr(trainer_lib, name).__module__.startswith("trainer_lib."), name
        assert name in dir(trainer_lib)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = trainer_lib.Trainr
    tree = ast.parse(Path(str(trainer_lib.__file__)).read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    # The three lists of names agree.
    assert imported - {"annotations", "TYPE_CHECKING", "Any"} == set(trainer_lib.__all__) == set(trainer_lib._NAMES)
