"""Writes questions about the standard library's functions, and pairs of a right and a wrong answer to them.

    python facts.py FOLDER

chats.jsonl: conversations of a question and its answer. Each function is asked about in several words, of which those
of the folds `validation` and `test` are for them alone: what they ask was learned from other words.

pairs.jsonl: questions of training as a chat model reads them, each with its answer and another function's.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MODULE = {
    "train": (
        "Which module has the function {}?",
        "Where do I find {}?",
        "What do I import to call {}?",
        "{} is a function of which module?",
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
    "test": ("I call {}. What do I give it first?",),
}
QUESTIONS = (MODULE, PARAMETER)
"""Kind of question -> fold -> its words."""
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def functions() -> dict[str, tuple[str, str]]:
    """Name of a documented public function -> its module and its first parameter; no name is that of two modules."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.stem.startswith("_") or path.stem not in sys.stdlib_module_names:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                parameters = [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
                found.setdefault(node.name, []).append((path.stem, (parameters or ["nothing"])[0]))
    return {name: places[0] for name, places in found.items() if len(places) == 1 and len(name) > 3}


def chats(known: dict[str, tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """A row for each function, question and wording."""
    for name, answers in known.items():
        for kind, (words_of, answer) in enumerate(zip(QUESTIONS, answers, strict=True)):
            for fold, words in words_of.items():
                for question in words:
                    turns = [("user", question.format(name)), ("assistant", answer)]
                    messages = [{"role": role, "content": content} for role, content in turns]
                    yield {"messages": messages, "fold": fold, "kind": kind}


def pairs(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """A row of chats as a preference: its answer over another one of the same kind of question."""
    draw, kept = random.Random(0), list(rows)
    answers = [sorted({row["messages"][1]["content"] for row in kept if row["kind"] == kind}) for kind in (0, 1)]
    for row in kept:
        asked, answered = (turn["content"] for turn in row["messages"])
        other = draw.choice([answer for answer in answers[row["kind"]] if answer != answered])
        yield {"prompt": ASKED.format(asked), "chosen": answered, "rejected": other, "fold": row["fold"]}


def main() -> None:
    """Write both files."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    rows = list(chats(functions()))
    for name, lines in (("chats", rows), ("pairs", pairs(rows))):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
