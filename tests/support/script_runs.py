"""Scripts written for the Trainer of transformers, run as they are and with one import line changed.

python -m tests.support.script_runs ours|transformers <set of scripts> <folder> <answer.json>
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.clients import Runs
from tests.support.repository import ROOT
from tests.support.script_data import save_models, save_rows

SCRIPTS = ROOT / "tests" / "clients" / "scripts"
#: Environment variable that names a checkout of transformers, whose own examples are run as well.
VARIABLE = "TRAINFLOW_TEST_TRANSFORMERS"
SIDES = ("ours", "transformers")
#: The names that come from another package on our side; every other import of a script stays.
SWAPPED = {"Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"}
HALFWAY = 6
_COMMON: dict[str, Any] = {"do_train": True, "do_eval": True, "per_device_train_batch_size": 4}
_COMMON |= {"per_device_eval_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1}
_COMMON |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
_COMMON |= {"train_sampling_strategy": "sequential", "report_to": "none", "use_cpu": True}


@dataclass(frozen=True)
class Script:
    """A script and how it is called."""

    title: str  # the row's name in docs/clients.md
    path: str  # its file, from the folder of scripts
    model: str  # the folder of its model, below the folder of models
    task: str  # the folder of its data
    auto: str  # the class of transformers that loads what it saves
    given: dict[str, Any] = field(default_factory=dict)  # its own arguments
    draws: bool = False  # it draws random numbers, which the two Trainers seed in their own ways


_PREDICTS = {"do_predict": True}
_GENERATES = {"do_predict": True, "predict_with_generate": True, "generation_max_length": 8}
_PIECES = {"gradient_accumulation_steps": 2}
_CLASSIFIER, _TAGGER = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
_DECODER, _FILLER, _TRANSLATOR = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
_READER = "AutoModelForQuestionAnswering"
#: Set of scripts -> its scripts.
SETS: dict[str, list[Script]] = {
    "own": [
        Script("script: text classification", "classify_texts.py", "bert", "pairs", _CLASSIFIER, _PREDICTS),
        Script("script: causal LM", "continue_texts.py", "llama", "texts", _DECODER, {**_PIECES, "max_length": 8}),
        Script("script: masked LM", "fill_texts.py", "bert", "texts", _FILLER),
        Script("script: translation", "translate_texts.py", "t5", "translation", _TRANSLATOR, _GENERATES),
        Script("script: token classification", "tag_words.py", "bert", "tags", _TAGGER, _PREDICTS),
        Script("script: question answering", "answer_questions.py", "bert", "questions", _READER, _PREDICTS),
    ],
    "official": [
        Script(
            *("run_glue", "text-classification/run_glue.py", "bert", "pairs", _CLASSIFIER),
            {**_PREDICTS, "max_seq_length": 16},
        ),
        Script("run_clm", "language-modeling/run_clm.py", "llama", "texts", _DECODER, {**_PIECES, "block_size": 8}),
        Script("run_mlm", "language-modeling/run_mlm.py", "bert", "texts", _FILLER, {"line_by_line": True}, draws=True),
        Script(
            *("run_translation", "translation/run_translation.py", "t5", "translation", _TRANSLATOR),
            {**_GENERATES, "source_lang": "en", "target_lang": "de", "max_source_length": 16, "max_target_length": 8},
        ),
        Script("run_ner", "token-classification/run_ner.py", "bert", "tags", _TAGGER, _PREDICTS),
        Script(
            *("run_qa", "question-answering/run_qa.py", "bert", "squad", _READER),
            {**_PREDICTS, "max_seq_length": 16, "doc_stride": 2},
        ),
    ],
}


def official_folder() -> Path | None:
    """Return the examples of the checkout of transformers that the environment names; None without one."""
    checkout = os.environ.get(VARIABLE)
    return Path(checkout) / "examples" / "pytorch" if checkout else None


def swap_imports(source: str) -> str:
    """Return a script that imports the Trainer and its arguments from trainer_lib and everything else as before."""
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if not isinstance(node, ast.ImportFrom) or node.module not in ("transformers", "transformers.trainer"):
            continue
        taken = [alias.name for alias in node.names if alias.name in SWAPPED]
        left = [ast.unparse(alias) for alias in node.names if alias.name not in SWAPPED]
        if taken:
            kept = [f"from {node.module} import {', '.join(left)}"] if left else []
            lines[node.lineno - 1 : node.end_lineno] = [*kept, f"from trainer_lib import {', '.join(taken)}"]
    return "\n".join(lines) + "\n"


def run_set(name: str, source: Path, folder: Path) -> Runs:
    """Run a set of scripts of the folder `source` on both sides, each in one process, below an empty folder."""
    save_models(folder / "models")
    save_rows(folder / "data")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / _STAND_INS)))}
    answers = []
    for side in SIDES:
        _put_scripts(side, source, folder / side / "scripts")
        answer = folder / f"{side}.json"
        env["HF_DATASETS_CACHE"] = str(folder / side / "cache")
        command = [sys.executable, "-m", "tests.support.script_runs", side, name, str(folder), str(answer)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        (folder / f"{side}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        assert answer.exists(), f"The scripts on {side} ended with exit code {done.returncode}:\n{done.stderr[-4000:]}"
        answers.append(json.loads(answer.read_text(encoding="utf-8")))
    return Runs(*answers)


#: Folder of modules that stand in for packages which fetch their data from the network.
_STAND_INS = "tests/support/stand_ins"


def _put_scripts(side: str, source: Path, target: Path) -> None:
    """Write the scripts of a folder to another one, with the imports of the side."""
    for path in source.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(swap_imports(text) if side == "ours" else text, encoding="utf-8")


def run(script: Script, scripts: Path, folder: Path, output: Path) -> dict[str, Any]:
    """Call a script for a whole training, and again for one that resumes halfway.

    Returns:
        errors: step -> what was raised. logs, resumed: the logs of the two trainings. results: all_results.json.
        weights: name -> shape of every weight of the saved model. loaded: how much `from_pretrained` changed one.
        files: what the folder holds.
    """
    given = {**_COMMON, "model_name_or_path": str(folder / "models" / script.model), **script.given}
    for split in ("train", "validation", "test"):
        if split != "test" or "do_predict" in script.given:
            given[f"{split}_file"] = str(folder / "data" / script.task / f"{split}.json")
    whole, again, path = output / "whole", output / "again", scripts / script.path
    outcome: dict[str, Any] = {"errors": {}, "logs": [], "resumed": [], "loaded": None}
    step = "trains"
    try:
        _call(path, {**given, "output_dir": str(whole)})
        outcome["logs"], outcome["results"] = _history(whole), _read(whole / "all_results.json")
        step = "resumes"
        given |= {"output_dir": str(again), "resume_from_checkpoint": str(whole / f"checkpoint-{HALFWAY}")}
        listed = output / "resumed.json"
        listed.write_text(json.dumps(given), encoding="utf-8")
        _call(path, listed)
        outcome["resumed"] = _history(again)
        step = "loads"
        outcome |= _load(script.auto, whole)
        outcome["files"] = sorted(each.name for each in whole.iterdir() if each.is_file())
    except (Exception, SystemExit) as error:  # a refused argument ends a script by SystemExit
        traceback.print_exc()
        outcome["errors"][step] = f"{type(error).__name__}: {error}"
    return outcome


def _call(path: Path, given: dict[str, Any] | Path) -> None:
    """Run a script as its own program; a path is that of a JSON file with its arguments."""
    words = [str(given)] if isinstance(given, Path) else [f"--{name}={value}" for name, value in given.items()]
    before, sys.argv = sys.argv, [str(path), *words]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
        sys.path.remove(str(path.parent))


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _history(folder: Path) -> Any:
    return _read(folder / "trainer_state.json")["log_history"]


def _load(auto: str, folder: Path) -> dict[str, Any]:
    import transformers
    from safetensors.torch import load_file

    loaded = getattr(transformers, auto).from_pretrained(folder).state_dict()
    transformers.AutoTokenizer.from_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    weights = {name: list(weight.shape) for name, weight in saved.items()}
    return {"weights": weights, "loaded": max(float((loaded[name] - saved[name]).abs().max()) for name in saved)}


def main(side: str, name: str, folder: str, answer: str) -> None:
    """Run every script of a set; write the outcomes as JSON."""
    root = Path(folder)
    scripts = root / side / "scripts"
    outcomes = {each.title: run(each, scripts, root, root / side / str(i)) for i, each in enumerate(SETS[name])}
    Path(answer).write_text(json.dumps(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
