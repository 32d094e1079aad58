"""What recipes refuse in prepare, before anything is trained: each with its file, row and column, and a way out."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from tests.support.named_recipes import RecipeCase, jsonl
from trainflow.flows.new_project.starting import read_sample

CASES = {
    "tabular-classification": RecipeCase("tabular-classification", options={"label": "answer"}),
    "tabular-regression": RecipeCase("tabular-regression", options={"label": "answer"}),
    "time-series-forecasting": RecipeCase(
        "time-series-forecasting",
        options={"time": "t", "target": "y", "context": 4, "horizon": 2, "split": {"validation": 0.2}},
    ),
    "text-classification": RecipeCase("text-classification", options={"text": "line", "label": "module"}),
    "token-classification": RecipeCase("token-classification", "data.jsonl"),
    "sequence-to-sequence": RecipeCase("sequence-to-sequence", options={"text": "name", "target": "parts"}),
    "embeddings": RecipeCase("embeddings", options={"query": "entity", "positive": "character"}),
    "question-answering": RecipeCase("question-answering", "data.jsonl"),
    "preference-optimization": RecipeCase(
        "preference-optimization",
        "data.jsonl",
        {"vocabulary": 600, "max_length": 128, "split": {"validation": 0, "test": 0.25}},
    ),
    "feedback-optimization": RecipeCase("feedback-optimization", "data.jsonl", {"vocabulary": 600, "max_length": 128}),
    "reward-modeling": RecipeCase("reward-modeling", "data.jsonl", {"vocabulary": 600, "max_length": 128}),
    "causal-language-modeling": RecipeCase("causal-language-modeling"),
}
STRATIFIED = {"split": {"by": "stratified"}}


def table(*more: str, rows: int = 40) -> str:
    lines = [f"{row % 7},{'red' if row % 3 else 'blue'},{'yes' if row % 2 else 'no'},{row // 4}" for row in range(rows)]
    return "\n".join(["size,colour,answer,house", *lines, *more]) + "\n"


def priced(*prices: str) -> str:
    return "\n".join(["size,answer", *(f"{row},{price}" for row, price in enumerate(prices))])


def counted(*more: str, steps: int = 30) -> str:
    return "\n".join(["t,y,who,day", *(f"{step},{step},ada,{step % 7}" for step in range(steps)), *more]) + "\n"


def tagged(*last: tuple[Any, Any]) -> str:
    return jsonl(*({"words": words, "tags": tags} for words, tags in (*[(["a", "b"], ["X", "Y"])] * 9, *last)))


def asked(*answers: Any, context: Any = "  Ada wrote the first program.", question: Any = "Who wrote it?") -> str:
    good = repeat({"question": "Who?", "context": "Ada did.", "answers": "Ada"}, 9)
    return jsonl(*chain(good, ({"question": question, "context": context, "answers": each} for each in answers)))


def preferred(**last: Any) -> str:
    rows = [{"prompt": f"say {n}", "chosen": f" {n} is said", "rejected": f" said is {n}"} for n in range(13)]
    return jsonl(*rows[:-1], {**rows[-1], **last})


def marked(**last: Any) -> str:
    rows = [{"prompt": f"say {n}", "completion": f" {n} is said", "label": n % 2 == 0} for n in range(13)]
    return jsonl(*rows[:-1], {**rows[-1], **last})


def talked(role: str, **more: Any) -> str:
    turns = [{"role": "user", "content": "a?"}, {"role": role, "content": "b"}]
    return jsonl(
        *({"chosen": turns, "rejected": [turns[0], {**turns[1], "content": f"c{n}"}], **more} for n in range(9))
    )


TABLE, GAP, RARE = table(), table().replace("1,red,yes,0", ",red,yes,0", 1), table("1,red,maybe,10")
NAMED = "\n".join(f"{line},{'name' if row == 0 else f'n{row}'}" for row, line in enumerate(table(rows=120).split()))
SEA: dict[str, Any] = {"time": "month", "target": "temperature", "context": 36, "horizon": 6, "season": 12}
ELNINO, MODULES = read_sample("elnino.csv"), read_sample("modules.csv")
MARCH = next(line for line in ELNINO.splitlines() if line.startswith("1960-03-01"))
WORD = table().replace("3,blue,yes,0", "unknown,blue,yes,0", 1)
HALF = counted().replace("\n12,", "\n12.5,")
TWELVE, GAP_IN_TIME = counted(steps=12), counted().replace("\n12,12,ada,5", "")
BY_TIME, BY_COLUMN = ({"split": {"by": by, "column": column}} for by, column in (("time", "house"), ("column", "fold")))
HOLES = counted().replace("\n12,12,ada,5", "").replace("\n13,13,", "\n13,,")
MONTHS = "t,y\n" + "".join(f"{202000 + 88 * (month // 12) + month + 1},{month}\n" for month in range(30))
LOCAL_DAYS = "t,y\n" + "".join(f"2024-03-{day}T00:00:00+01:00,{day}\n" for day in range(10, 32))
LOCAL_DAYS += "2024-04-01T00:00:00+02:00,1\n"
LATE = counted(*(f"{step},{step},bea,1" for step in range(20, 30)))
NAMES, PAIRS = "name,parts\n" + "a,b\n" * 9, "entity,character\n" + "".join(f"a{row},b{row}\n" for row in range(9))
TEXTS = "text\n" + "a text\n" * 9
SAME = " the same words again and again" * 50
LISTS = jsonl(*({"line": f"l{row}", "module": [row % 2, 1, 0]} for row in range(9)))
SEVERAL: dict[str, Any] = {"target": "several"}
TYPED = "line,module,part\n" + "".join(f"l{row},{row % 2},train\n" for row in range(9)) + "l9,1.0,test\n"
FOLDS = jsonl(
    {"words": ["a", "b"], "tags": ["X", "Y"], "fold": "train"}, {"words": ["a"], "tags": ["Z"], "fold": "test"}
)

#: Recipe -> the file's content, options beside the usual ones, and what the error says, in parts.
REFUSED: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "tabular-classification": [
        (TABLE, {"label": "anser"}, 'prepare.options.label … Did you mean "answer"?'),
        (TABLE, {"label": None}, "label"),
        (TABLE, {"features": ["sise"]}, 'Did you mean "size"?'),
        (TABLE, {"ignored": ["size"]}, 'Did you mean "ignore"?'),
        (TABLE, {"split": {"by": "grup"}}, 'Did you mean "group"?'),
        (WORD, {}, "data.csv, row 3 (line 5), column 'size': 'unknown' is not a number … 39 of the 40 … ical=[size]"),
        (GAP, {}, "row 1 (line 3), column 'size': there is no value, as in 1 of 40 rows … missing=mean"),
        (table().replace("1,red,yes,0", "1,red,,0", 1), {}, "column 'answer': there is no value"),
        (RARE, {}, "has no row of the class 'maybe', of which there are 1 in all … absent_classes"),
        (RARE, BY_TIME, "row 40 (line 42): the label 'maybe' in the split 'test' is in no row of train"),
        (table().replace(",no,", ",yes,"), {}, "All training rows have the label 'yes'"),
        (table(rows=4), {}, "gets none of the 4 rows"),
        (TABLE, {"split": {"test": 0.9}}, "Nothing is left to train on"),
        (TABLE, {"split": {"by": "group"}}, "needs the name of a column"),
        (NAMED, {}, "it is not a category"),
        (priced(*(f"{row % 25}.5" for row in range(200))), {}, "amounts, not classes … tabular-regression"),
        (priced(*(str(7 * row) for row in range(40))), {}, "amounts, not classes … tabular-regression"),
        (priced("tbd", *(f"{row}.5" for row in range(12))), {}, "12 different numbers … amounts, not classes"),
        (TABLE, {"id": "house"}, "Two rows have one id."),
        (table().replace("colour", "labels", 1), {}, "uses the name 'labels' itself"),
        ("size,answer\n1,2\n1\n", {}, "prepare.sources … data.csv, row 1 (line 3)"),
        ("size,answer\n", {}, "prepare.sources … The files have no rows."),
    ],
    "tabular-regression": [
        (TABLE, {}, "holds texts, such as 'no'"),
        (
            priced("1", "2", "NA", *"4567890"),
            {},
            "(line 4), column 'answer': there is no value, as in 1 of 10 rows",
        ),
    ],
    "time-series-forecasting": [
        (counted("7,99,x,1"), {}, "row 30 (line 32): the time 7 is that of … row 7 (line 9) … options.series=NAME"),
        (HALF, {},
            "row 12 (line 14): the time 12.5 is not on the grid that begins at 0 and has a step of 1 … (a number:"),
        (ELNINO.replace("1960-03-01", "1960-03-05"), SEA, "the time 1960-03-05 is not on the grid"),
        (ELNINO.replace("1960-03-01", "March 1960"), SEA, "column 'month': 'March 1960' is not a time"),
        (ELNINO, {**SEA, "step": "moon"}, "not a step of time"),
        (ELNINO.replace(f"{MARCH}\n", ""), SEA, "lacks 1 steps"),
        (ELNINO.replace(f"{MARCH}\n", ""), {**SEA, "step": "MS"}, "lacks 1 steps"),
        (HOLES, {}, "column 'y': there is no value, as in 1 of 29 rows"),
        (HOLES.replace("\n13,,", "\n13,NA,"), {}, "column 'y': there is no value, as in 1 of 29 rows"),
        (MONTHS, {"missing": "previous"}, "such as 202001, look like dates … time_format=%Y%m, or"),
        (LOCAL_DAYS, {}, "2024-03-31T22:00:00Z is not on the grid … local days need dates without one"),
        (counted(), {"step": -1}, "not a step of time"),
        (counted(), {"held_out_stride": -1}, "held_out_stride … at least one"),
        (GAP_IN_TIME, {}, "row 12 (line 14): before this row the table lacks 1 steps, and 1 in all"),
        (counted().replace("\n0,0,", "\n0,,"), {"missing": "previous"}, "the first value is missing"),
        (counted(), {"context": 40}, "has 30 steps, and a window needs 42"),
        (counted("1,1,bo,1", "1,1,cy,1"), {"series": "who"}, "'bo' has 1 step, … are 1 more, such as cy"),
        (ELNINO.replace("1960-03-01", "1960-W09"), SEA, "'1960-W09' is not a time … Write its first day, such as"),
        (ELNINO, {**SEA, "time_format": "%G-W%V"}, "This is not a form of times: ISO year directive"),
        (TWELVE, {"split": {"validation": 0.1, "test": 0.2}}, "'validation' has 1 step, and no window of 2 targets"),
        (TWELVE, {"split": {"validation": 0.3, "test": 0.3}}, "behind 4 known ones"),
        (counted(), {"split": {"by": "random"}}, "= random"),
        (counted(), {"split": {"validation": 0.5, "test": 0.5}}, "Nothing is left"),
        (counted(), {"season": 5}, "does not fit into a context of 4"),
        (counted(), {"time": None}, "where the times are"),
        (counted(), {"target": None}, "what to forecast"),
        (counted(), {"target": "Y"}, 'Did you mean "y"?'),
        (counted(), {"horizn": 3}, 'Did you mean "horizon"?'),
        (counted(), {"known": ["y"]}, "A column has one use"),
        (counted(), {"known": ["who"]}, "holds texts"),
        (LATE, {"series": "who", "season": 1}, "'bea' has 0 steps to train on"),
    ],
    "text-classification": [
        (MODULES.replace("\n", "\n,ast\n", 1), {}, "data.csv, row 0 (line 2), column 'line': there is no value"),
        (MODULES, {"text": "lines"}, 'Did you mean "line"?'),
        (MODULES, {"text": None}, "where the texts are"),
        (MODULES, {"max_lenght": 3}, 'Did you mean "max_length"?'),
        (MODULES, {"pretrained": "a", "folder": "b"}, "A model has a name or a folder, and not both."),
        (MODULES, {"text": "module"}, "options.text … A text cannot be what is predicted from it."),
        (MODULES, {"text": ["line"]}, "takes the name of one column"),
        (MODULES, {"label": ["module", "b"]}, "label=[A, B] and prepare.options.target=several"),
        ("line,a,b\nx,1,0\ny,0,-1", SEVERAL | {"label": ["a", "b"]}, "row 1 (line 3), column 'b': '-1' is not 0 or 1"),
        ("line,a,b\nx,1,0", SEVERAL | {"label": ["a", "bb"]}, 'no such column … Did you mean "b"?'),
        (MODULES + "a,null\n", {}, "column 'module': there is no value … Read as no value: 'null' (1)."),
        ('line,module\na,"[1, 1]"', SEVERAL, "column 'module': [1, 1] marks classes by 0 and 1 … zip(NAMES, MARKS)"),
        ("line,module\na,[1 0]", SEVERAL, "a text is not a list, such as '[1 0]' … Write lists in JSON"),
        (TYPED, {"split": {"by": "column", "column": "part"}}, "the label '1.0' … Write it as '1', as train does."),
        (LISTS, {}, "data.jsonl, row 0 … a list is neither a number nor a text … need target: several"),
        ('line,module\n' + 'a,"[1, 0]"\n"b","[0, 1]"\n' * 9, SEVERAL, "All training rows have the label '0' and '1'"),
        (LISTS, SEVERAL, "row 0 (line 1), column 'module': [0, 1, 0] marks classes by 0 and 1"),
        (jsonl({"line": {"0": "a"}, "module": {"0": "b"}}), {},
            "'module': a dict is neither … to_json(orient='records', lines"),
    ],
    "token-classification": [
        (tagged((["a", "b"], ["X"])), {}, "data.jsonl, row 9 (line 10): there are 2 words and 1 tags."),
        (tagged(([], [])), {}, "column 'words': the list of words is empty."),
        (tagged((None, ["X"])), {}, "there is no value"),
        (tagged(("a b", ["X"])), {},
            "'words': a text is not a list, such as 'a b' … of a text with spans of characters"),
        (tagged((["a", ""], ["X", "Y"])), {}, "row 9 (line 10), column 'words': number 1 of the list is empty"),
        (FOLDS, BY_COLUMN, "row 1 (line 2): the tag 'Z' of word 0 ('a') in the split 'test' is in no row of train"),
        (jsonl(*[{"words": ["a"], "tags": ["X"]}] * 9), {}, "there is nothing to learn"),
        (tagged((["a", "b"], ["X", -100])), {"split": {"test": 0.1, "seed": 0}}, "The tag -100 marks tokens"),
        (tagged(), STRATIFIED, "no class to cut by"),
        (tagged(), {"words": "word"}, 'Did you mean "words"?'),
        (tagged(), {"max_lenght": 3}, 'Did you mean "max_length"?'),
    ],
    "sequence-to-sequence": [
        (NAMES + "a,\n", {}, "row 9 (line 11), column 'parts': there is no value"),
        (NAMES + ' ,"b"\n', {}, "row 9 (line 11), column 'name': there is no value"),
        (NAMES, {"target": "part"}, 'Did you mean "parts"?'),
        (NAMES, {"text": "nam"}, 'Did you mean "name"?'),
        (NAMES, {"text": None}, "where the texts are"),
        (NAMES, {"target": None}, "prepare.options.target"),
        (NAMES, {"target": "name"}, "options.text … A text cannot be what is predicted from it."),
        (jsonl({"name": "a", "parts": {"en": "b"}}) * 9, {}, "a dict is neither … a part of its objects (parts.KEY)"),
        (jsonl({"name": "a", "parts": {"en": "b"}}) * 9, {"target": "parts.de"}, 'Did you mean "parts"?'),
        (NAMES, STRATIFIED, "no class to cut by"),
        (NAMES, {"max_lenght": 3}, 'Did you mean "max_length"?'),
        (NAMES, {"folder": "/nowhere/model"}, "cannot load this model"),
        (NAMES.replace("name", "labels", 1), {"text": "labels"}, "uses the name 'labels' itself"),
    ],
    "embeddings": [
        (PAIRS + "a,\n", {}, "row 9 (line 11), column 'character': there is no value"),
        (PAIRS + ' ,"b"\n', {}, "row 9 (line 11), column 'entity': there is no value"),
        (PAIRS, {"positive": "charakter"}, 'Did you mean "character"?'),
        (PAIRS, STRATIFIED, "no class to cut by"),
        ("entity,character\n" + "a,b\n" * 9, {}, "have one text"),
    ],
    "question-answering": [
        (asked("Eve"), {}, "row 9 (line 10): the answer 'Eve' is not in the context"),
        (asked({"text": ["Ada"], "answer_start": [0]}), {}, "the answer 'Ada' is not at character 0 of the context"),
        (asked({"text": ["Ada"], "answer_start": [0, 1]}), {}, "(line 10), column 'answers': there are 1 texts and 2"),
        (asked({"texts": ["Ada"]}), {}, "there is no 'text'"),
        (asked([" "]), {}, "an answer is empty"),
        (asked({"text": [{}]}), {}, "a dict is not an answer"),
        (asked({"text": "Ada", "answer_start": -1}), {}, "is not the number of a character"),
        (jsonl({"question": "Who?", "context": "Ada.", "answers": []}) * 9, {}, "o training row has an answer"),
        (asked("Ada", context="  "), {}, "column 'context': there is no value"),
        (asked("Ada", context=1), {}, "a int is not a text"),
        (asked("Ada", question=""), {}, "column 'question': there is no value"),
        (asked(), STRATIFIED, "not classes to cut by"),
        (asked(), {"context": "contxt"}, 'Did you mean "context"?'),
        (asked(), {"answers": "answer"}, 'Did you mean "answers"?'),
        (asked(), {"max_lenght": 3}, 'Did you mean "max_length"?'),
        (asked("Ada", question="why " * 40), {"max_length": 64, "stride": 32}, "row 9 (line 10): the question 'why"),
        (asked() + '{"question": "a', {}, "prepare.sources … line 10"),
        (asked() + '{"question": "a", "b": 2}', {}, "prepare.sources … it has a column 'b' more than the rows before"),
    ],
    "preference-optimization": [
        (preferred(chosen=" "), {}, "data.jsonl, row 12 … column 'chosen': there is no value"),
        (preferred(prompt=""), {}, "column 'prompt': there is no value"),
        (preferred(rejected=None), {}, "column 'rejected': there is no value"),
        (preferred(rejected=" 12 is said "), {}, "jsonl, row 12 … 'chosen' and 'rejected': the two answers are alike"),
        (preferred(chosen=[{"role": "assistant"}]), {}, "column 'chosen': a list is not a text"),
        (preferred(prompt="a long prompt " * 200), {}, "options.max_length … row 12 … column 'prompt': the prompt has"),
        (preferred(chosen=SAME + " a", rejected=SAME + " b"), {}, "are the same for both answers"),
        (preferred(), {"chosen": "choosen"}, 'Did you mean "chosen"?'),
        (preferred(), STRATIFIED, "no class to cut by"),
        (preferred().replace('"prompt"', '"labels"'), {"prompt": "labels"}, "uses the name 'labels' itself"),
    ],
    "feedback-optimization": [
        (marked(label="maybe"), {}, "data.jsonl, row 12 … column 'label': 'maybe' is neither true nor false"),
        (marked(label=None), {}, "column 'label': 'none' is neither"),
        (marked(completion=""), {}, "column 'completion': there is no value"),
        (marked(), STRATIFIED, "no classes to cut by"),
        (marked(), {"label": "labels"}, 'Did you mean "label"?'),
        (marked().replace('"prompt"', '"other"'), {"prompt": "other"}, "uses the name 'other' itself"),
    ],
    "reward-modeling": [
        (preferred(rejected=" 12 is said "), {}, "the two answers are alike"),
        (preferred(chosen=SAME + " a", rejected=SAME + " b"), {}, "are the same for both answers"),
        (talked("human"), {}, "row 0 (line 1): turn 2: the role 'human' is unknown"),
        (
            talked("assistant"),
            {"template": "{{ messages[9].content }}"},
            "row 0 (line 1): the template does not take it",
        ),
        (talked("assistant"), {"max_length": 5}, "the prompt has"),
    ],
    "causal-language-modeling": [
        (TEXTS, {"lenght": 3}, "prepare.options.lenght … no such option"),
        (TEXTS, {"length": 1}, "prepare.options.length … two tokens"),
        (TEXTS, {"isolate": "masks"}, "prepare.options.isolate … one of the choices"),
        (TEXTS, {"pack": ["trian"]}, "prepare.options.pack … one of the choices"),
        (TEXTS, {"overlong": "cut"}, "prepare.options.overlong … one of the choices"),
        (TEXTS, {"pretrained": "a", "folder": "b"}, "prepare.options.folder … not both"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "content", "options", "said"),
    [pytest.param(name, *row, id=f"{name}-{row[-1]}") for name, rows in REFUSED.items() for row in rows],
)
def test_a_recipe_refuses_what_would_spoil_the_training(
    recipe: str, content: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    case = CASES[recipe]
    case = replace(case, file="data.jsonl") if content.startswith("{") else case
    text = str(case.refused(tmp_path, content, **options))
    assert [part for part in said.split(" … ") if part not in text] == [], text


def test_a_word_of_a_file_in_columns_has_a_tag(tmp_path: Path) -> None:
    case = RecipeCase("token-classification", "a.conll")
    assert "a.conll, line 1: the word 'EU' has no tag" in case.refused(tmp_path, "EU\n\n").message
    numbered = case.refused(tmp_path, "# text = EU is\n1 EU B-ORG\n2 is O\n\n1 it O\n")
    assert "the first column counts the words" in numbered.message
