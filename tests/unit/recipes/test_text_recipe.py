"""The recipe text-classification: tokenizers, models by configuration and folder, and the texts that it refuses."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.new_project.starter_data import modules
from trainer_lib import Trainer, TrainingArguments
from trainer_lib.errors import ConfigError, DataError, TrainflowError
from trainer_lib.launch import LaunchConfig, launch
from trainer_lib.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.recipes.tokenizing import learn_tokenizer
from trainer_lib.requests import PrepareRequest, RecipeFile
from trainer_lib.storage import Store

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
GIVEN = {"text": "line", "label": "module"}


def prepared(where: Path, content: str, /, **options: Any) -> tuple[Recipe, dict[str, list[Any]], DataInfo]:
    (where / "lines.csv").write_text(content)
    recipe = load(recipe_file("text-classification"), where)
    out = PrepareOutput(Store.open(where / "out"), [str(where / "lines.csv")])
    splits = {name: [dict(row) for row in rows] for name, rows in recipe.prepare({**GIVEN, **options}, out).items()}
    files = [vars(entry) for entry in out.files()]
    rows = {name: {"rows": len(each)} for name, each in splits.items()}
    data = {"url": str(where / "out"), "info": out.checked_info(), "splits": rows, "files": files}
    return recipe, splits, DataInfo(data)


def refused(where: Path, content: str, /, **options: Any) -> TrainflowError:
    with pytest.raises(TrainflowError) as caught:
        prepared(where, content, **options)
    assert isinstance(caught.value, ConfigError | DataError)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(("long", "pair"), [(1, False), (0, False), (3, False), (3, True)])
def test_texts_that_are_cut_are_counted_and_over_one_percent_of_them_are_a_warning(
    tmp_path: Path, long: int, pair: bool
) -> None:
    # 100 rows; a short text has a word, with the tokens that begin and end it three.
    texts = ["word " * 20] * long + ["word"] * (100 - long)
    lines = [f"{text},{'b' if pair else ''},{'xy'[row % 2]}" for row, text in enumerate(texts)]
    (tmp_path / "lines.csv").write_text("\n".join(["line,other,module", *lines]))
    more = {"pair": "other"} if pair else {}
    asked = PrepareRequest(
        output=str(tmp_path / "out"),
        recipe=RecipeFile(str(recipe_file("text-classification")), str(tmp_path)),
        options={**GIVEN, **more, "max_length": 6, "vocabulary": 50},
        sources=(str(tmp_path / "lines.csv"),),
    )
    shown: list[str] = []
    config = LaunchConfig(kind="in_process")

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            shown.append(event["message"])

    result = launch(asked, config, env={}, on_line=lambda line: None, on_event=on_event)
    assert result.info["cut_texts"] == long
    assert shown == list(result.warnings)
    if long <= 1:
        assert shown == []
    else:
        [warning] = shown
        assert warning.startswith("3 of 100 texts (3%) have more than 6 tokens, and are cut")
        assert "prepare.options.max_length" in warning


def test_a_model_that_begins_at_random_beats_the_most_frequent_class(tmp_path: Path) -> None:
    recipe, splits, data = prepared(tmp_path, modules(), max_length=32, vocabulary=1000, split={"test": 0.3})
    assert data.info["vocabulary"] == 1000
    torch.manual_seed(0)
    collate = recipe.collate_with(data)
    trainer = Trainer(
        model=recipe.build_model({"config": TINY}, data),
        args=TrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=120,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        data_collator=collate,
        train_dataset=splits["train"],
        compute_metrics=recipe.compute_metrics,
    )
    trainer.train()
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_majority_accuracy"] == pytest.approx(0.25, abs=0.01)
    assert measured["eval_accuracy_over_majority"] > 0.1, "twice the width of the interval of 360 rows"
    # A new row has a text and nothing else.
    new = [{"line": "parser.add_argument('--size', help=SUPPRESS)"}]
    assert collate is not None
    assert set(collate(new)) >= {"input_ids", "attention_mask"}
    predicted = recipe.prediction_columns(trainer.predict(new).predictions, data)
    assert predicted["prediction"][0] in data.info["classes"]


def test_equal_texts_give_an_equal_vocabulary_in_which_only_our_tokens_are_special() -> None:
    texts = [line.rpartition(",")[0] for line in modules().splitlines()]
    first, again = (learn_tokenizer(texts, vocabulary=2000, max_length=64) for _ in range(2))
    assert first.get_vocab() == again.get_vocab()
    assert len(first) == 2000
    assert sorted(first.all_special_tokens) == ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
    assert first.tokenize("return ##e") == ["return", "#", "#", "e"]
    assert first.decode(first("return self.path")["input_ids"], skip_special_tokens=True) == "return self . path"


def test_a_batch_is_the_same_in_a_data_worker_that_is_spawned(tmp_path: Path) -> None:
    recipe, splits, data = prepared(tmp_path, modules(), max_length=16, vocabulary=200)
    collate = recipe.collate_with(data)
    assert collate is not None
    batch = collate(splits["train"][:4])
    assert batch["input_ids"].shape[1] <= 16
    again = pickle.loads(pickle.dumps(collate))(splits["train"][:4])
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_a_model_comes_from_a_folder_and_its_head_must_fit_the_labels(tmp_path: Path) -> None:
    recipe, _, data = prepared(tmp_path, modules(), max_length=16, vocabulary=200)
    folder = tmp_path / "model"
    first: Any = recipe.build_model({"config": TINY}, data)
    first.save_pretrained(folder)
    second = recipe.build_model({"folder": folder}, data)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    fewer = copy.copy(data)
    fewer.info = {**data.info, "classes": data.info["classes"][:3]}
    with pytest.raises(ConfigError, match="knows 4 classes, and the data has 3") as caught:
        recipe.build_model({"folder": folder}, fewer)
    assert "new_head=true" in str(caught.value.remedy)
    assert recipe.build_model({"folder": folder, "new_head": True}, fewer).config.num_labels == 3
    with pytest.raises(ConfigError, match="cannot load this model"):
        recipe.build_model({"folder": tmp_path / "nowhere"}, data)


def test_a_tokenizer_without_a_token_to_pad_with_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.WordLevel({"<eos>": 0, "x": 1}, unk_token="x"))
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=bare, eos_token="<eos>").save_pretrained(tmp_path / "bare")
    error = refused(tmp_path, modules(), folder=tmp_path / "bare")
    assert "no token to pad with" in error.message
    assert error.remedy == "Set prepare.options.pad_token=<eos>, a token that it has."
    _, _, data = prepared(tmp_path, modules(), folder=tmp_path / "bare", pad_token="<eos>")
    assert data.info["pad_token_id"] == 0
    assert "no token '<pad>'" in refused(tmp_path, modules(), folder=tmp_path / "bare", pad_token="<pad>").message


def test_empty_texts_and_wrong_options_are_refused(tmp_path: Path) -> None:
    lines = modules().splitlines()
    empty = "\n".join([*lines[:3], ",ast", *lines[3:]])
    error = refused(tmp_path, empty)
    assert "lines.csv, row 2 (line 4), column 'line': there is no value" in error.message
    assert refused(tmp_path, modules(), text="lines").remedy == 'Did you mean "line"?'
    assert "where the texts are" in refused(tmp_path, modules(), text=None).message
    assert refused(tmp_path, modules(), max_lenght=3).remedy == 'Did you mean "max_length"?'
    both = refused(tmp_path, modules(), pretrained="a", folder=tmp_path)
    assert both.message == "A model has a name or a folder, and not both."
