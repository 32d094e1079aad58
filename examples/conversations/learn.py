"""From questions to a published model that answers them: supervised fine-tuning, then preferences.

    python examples/conversations/learn.py [FOLDER]

The questions are about functions of this interpreter's standard library. A function is asked about in several words.
Those of the folds `validation` and `test` are theirs alone: what is asked there was learned from other words.
"""

from __future__ import annotations

import ast
import json
import random
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import trainflow

HERE = Path(__file__).parent
MODULE = {
    "train": (
        "Which module has the function {}?",
        "Where do I find {}?",
        "What do I import to call {}?",
        "The function {} is of which module?",
    ),
    "validation": ("In which module of the library is {}?",),
    "test": ("I need {}. Which module has it?",),
}
PARAMETER = {
    "train": (
        "What is the first parameter of {}?",
        "What does {} take first?",
        "How is the first argument of {} called?",
        "Name the parameter of {} that comes first.",
    ),
    "validation": ("Which parameter does {} have at first?",),
    "test": ("I call {}. Which parameter is the first one?",),
}
QUESTIONS = (MODULE, PARAMETER)
"""Kind of question -> fold -> its words."""


def functions(fewest: int = 9) -> dict[str, tuple[str, str]]:
    """Name of a documented function -> its module and its first parameter, of modules with many such functions.

    No name is that of two modules; tools for programmers of Python itself are left out.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.stem not in sys.stdlib_module_names - {"pickletools", "pydoc", "turtle"} or path.stem.startswith("_"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                parameters = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
                found.setdefault(node.name, []).append((path.stem, (parameters or ["nothing"])[0]))
    known = {name: places[0] for name, places in found.items() if len(places) == 1 and len(name) > 3}
    sizes = Counter(module for module, _ in known.values())
    return {name: answers for name, answers in known.items() if sizes[answers[0]] >= fewest}


def chats() -> list[dict[str, Any]]:
    """A question and its answer for each function and wording; `kind` is 0 for modules, 1 for parameters."""
    return [
        {
            "messages": [
                {"role": "user", "content": question.format(name)},
                {"role": "assistant", "content": answer},
            ],
            "fold": fold,
            "kind": kind,
        }
        for name, answers in functions().items()
        for kind, (words, answer) in enumerate(zip(QUESTIONS, answers, strict=True))
        for fold, questions in words.items()
        for question in questions
    ]


def pairs(rows: Iterable[dict[str, Any]], answered: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Preferences of rows: the right answer over what a model answered, or where that is right over another one."""
    draw, kept = random.Random(0), list(rows)
    answers = [sorted({row["messages"][1]["content"] for row in kept if row["kind"] == kind}) for kind in (0, 1)]
    for row, answer in zip(kept, answered, strict=True):
        asked, right = row["messages"][0], row["messages"][1]["content"]
        others = [other for other in answers[row["kind"]] if other != right]
        wrong = draw.choice(others) if answer.strip() in ("", right) else answer
        turns = {
            name: [{"role": "assistant", "content": text}] for name, text in (("chosen", right), ("rejected", wrong))
        }
        yield {"prompt": [asked], **turns}


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train(folder: Path, *settings: str) -> dict[str, np.ndarray]:
    """Train both in a folder, with settings of both specs; whether answers to the test's questions are right."""
    rows = chats()
    write_lines(folder / "chats.jsonl", rows)
    given = (f"storage={folder / 'store'}", *settings)
    first = trainflow.Spec.load(HERE / "sft.yaml", f"prepare.sources=[{folder / 'chats.jsonl'}]", *given).run()
    tuned = first.load_model()

    asked = [row for row in rows if row["fold"] == "validation"]
    answered = tuned.predict([{"prompt": question(row), "new_tokens": 16} for row in asked])["answer"]
    write_lines(folder / "pairs.jsonl", pairs(asked, answered))
    place = model_folder(folder)
    models = [f"{section}.folder={place}" for section in ("prepare.options", "train.model")]
    sources = f"prepare.sources=[{folder / 'pairs.jsonl'}]"
    second = trainflow.Spec.load(HERE / "dpo.yaml", sources, *models, *given).run()

    test = [row for row in rows if row["fold"] == "test"]
    before = tuned.predict([{"prompt": question(row), "new_tokens": 16} for row in test])["answer"]
    after = second.load_model().predict([{"prompt": row["messages"][:1]} for row in test])["prediction"]
    right = {"fine-tuned": is_right(test, before), "then preferred": is_right(test, after)}
    right["gain"] = right["then preferred"] - right["fine-tuned"]
    for name, values in right.items():
        print(f"{name:14} {values.mean():.3f} ({interval(values)})")
    return right


def question(row: dict[str, Any]) -> str:
    """What the user says."""
    return str(row["messages"][0]["content"])


def model_folder(folder: Path) -> Path:
    """What `save_pretrained` writes, of the model that the first pipeline has published."""
    published = folder / "store" / "hub" / "library-answers"
    newest = published / (published / "NEWEST").read_text().strip()
    made = folder / newest.name
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(newest / "assets" / "tokenizer", made)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(newest / name, made)
    return made


def is_right(rows: Sequence[dict[str, Any]], answers: Sequence[str]) -> np.ndarray:
    """Whether each answer is that of its row, whole."""
    return np.array([row["messages"][1]["content"] == answer for row, answer in zip(rows, answers, strict=True)], float)


def interval(values: np.ndarray) -> str:
    """The mean's interval of 95 % by bootstrap."""
    draws = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return f"{low:.3f} to {high:.3f}"


def main() -> None:
    """Write the questions, train twice, and compare the answers to questions in words that were never trained."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parents[1] / ".trainflow" / "conversations").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    train(folder, *sys.argv[2:])


if __name__ == "__main__":
    main()
