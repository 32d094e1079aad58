"""The recipe causal-language-modeling: packed training, ordinary evaluation, adapters, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.errors import ConfigError, DamagedError, DataError, TrainflowError
from trainer_lib.recipe_names import recipe_file
from trainer_lib.recipes import DataInfo, PrepareOutput, Recipe, load
from trainer_lib.storage import Store
from trainer_lib.worker.assembly import load_weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
OPTIONS = {"vocabulary": 400, "length": 64, "overlong": "split", "split": {"validation": 0.0, "test": 0.3}}
SOURCES = ("stdlib:json", "stdlib:concurrent")
Prepared = tuple[Recipe, dict[str, list[Any]], DataInfo]


def prepare(where: Path, *sources: str, **options: Any) -> Prepared:
    recipe = load(recipe_file("causal-language-modeling"), where)
    out = PrepareOutput(Store.open(where / "out"), list(sources or SOURCES))
    chosen = {**OPTIONS, **options}
    splits = {name: [dict(row) for row in rows] for name, rows in recipe.prepare(chosen, out).items()}
    files = [vars(entry) for entry in out.files()]
    rows = {name: {"rows": len(each)} for name, each in splits.items()}
    data = {"url": str(where / "out"), "info": out.checked_info(), "splits": rows, "files": files}
    return recipe, splits, DataInfo(data)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("prepared"))


def trainer_of(recipe: Recipe, data: DataInfo, model: Any, folder: Path, rows: list[Any], steps: int) -> Trainer:
    return recipe.trainer_class(Trainer)(  # type: ignore[no-any-return]
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        data_collator=recipe.collate_with(data),
        train_dataset=rows,
        compute_metrics=recipe.compute_metrics,
        preprocess_logits_for_metrics=recipe.preprocess_logits_for_metrics,
    )


def test_training_is_packed_evaluation_is_not_and_the_model_beats_the_frequencies(
    prepared: Prepared, tmp_path: Path
) -> None:
    recipe, splits, data = prepared
    counts = data.info["packing"]["train"]
    assert counts["tokens_out"] == counts["tokens_in"] == sum(len(row["input_ids"]) for row in splits["train"])
    assert counts["padding"] < 0.1 * counts["rows"] * 64
    assert any(len(row["lengths"]) > 1 for row in splits["train"])
    assert all(len(row["lengths"]) == 1 for row in splits["test"])
    torch.manual_seed(0)
    model: Any = recipe.build_model({"config": TINY}, data)
    trainer = trainer_of(recipe, data, model, tmp_path / "run", splits["train"], 40)
    trainer.train()
    measured = trainer.evaluate(eval_dataset=splits["test"])
    assert measured["eval_nats_below_unigram"] > 0.2
    assert measured["eval_nats_per_token"] == pytest.approx(measured["eval_loss"], rel=1e-3)
    assert measured["eval_tokens"] == sum(len(row["input_ids"]) - 1 for row in splits["test"])
    # The frequencies of the tokens that were predicted, by hand.
    targets = np.concatenate([row["input_ids"][1:] for row in splits["test"]])
    shares = np.bincount(targets)[np.bincount(targets) > 0] / len(targets)
    assert math.log(measured["eval_unigram_perplexity"]) == pytest.approx(-(shares * np.log(shares)).sum())
    predictions = np.asarray(trainer.predict(splits["test"]).predictions)
    columns = recipe.prediction_columns(predictions, data)
    assert list(columns["tokens"]) == [len(row["input_ids"]) - 1 for row in splits["test"]]
    assert recipe.after_evaluate is not None
    made = recipe.after_evaluate(model.eval(), data, {"prompts": ["def "], "sample_tokens": 5})
    assert made["files"]["samples.txt"].startswith(b"def ")
    assert recipe.after_evaluate(model, data, {}) == {}


@pytest.mark.parametrize("isolate", ["positions", "mask"])
def test_flat_training_takes_the_steps_of_padded_training_without_the_padding(tmp_path: Path, isolate: str) -> None:
    recipe, splits, data = prepare(tmp_path, "stdlib:json", pack=[], isolate=isolate, length=48)
    assert all(len(row["lengths"]) == 1 for row in splits["train"])
    weights, measured, shapes = [], [], []
    for flatten in (False, True):
        torch.manual_seed(0)
        model: Any = recipe.build_model({"config": TINY, "flatten": flatten}, data)
        trainer = trainer_of(recipe, data, model, tmp_path / str(flatten), splits["train"], 5)
        shapes.append([tuple(batch["input_ids"].shape) for batch in trainer.get_train_dataloader()])
        trainer.train()
        weights.append([each.detach() for each in model.parameters()])
        # Rows are measured one by one all the same.
        measured.append(trainer.evaluate(eval_dataset=splits["test"])["eval_nats_per_token"])
        assert np.asarray(trainer.predict(splits["test"]).predictions).shape == (len(splits["test"]), 2)
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)
    padded, flat = shapes
    assert all(rows == 1 for rows, _ in flat)
    assert sum(tokens for _, tokens in flat) == sum(len(row["input_ids"]) for row in splits["train"])
    assert sum(rows * tokens for rows, tokens in padded) > sum(tokens for _, tokens in flat)


def test_flat_training_is_refused_for_packed_rows_and_for_models_that_mix_documents(
    prepared: Prepared, tmp_path: Path
) -> None:
    refused = refused_model(prepared, {"config": TINY, "flatten": True})
    assert refused.field == "train.model.flatten"
    assert "prepare.options.pack=[]" in str(refused.remedy)
    unpacked = prepare(tmp_path, "stdlib:json", pack=[])
    mamba = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    refused = refused_model(unpacked, {"config": mamba, "flatten": True})
    assert refused.field == "train.model.flatten"
    assert "stand end to end" in refused.message
    unpacked[0].build_model({"config": mamba}, unpacked[2])


def test_new_rows_are_texts_measured_as_documents_and_continued(prepared: Prepared, tmp_path: Path) -> None:
    from trainer_lib.recipes.tokenizing import kept_tokenizer

    recipe, splits, data = prepared
    assert data.info["new_columns"] == {"text": "string", "new_tokens": "int64"}
    torch.manual_seed(0)
    model: Any = recipe.build_model({"config": TINY}, data)
    trainer = trainer_of(recipe, data, model, tmp_path / "run", splits["train"], 20)
    trainer.train()
    tokenizer = kept_tokenizer(data)
    end = tokenizer.eos_token_id
    known = [row for row in splits["test"] if row["input_ids"][-1] == end and len(row["input_ids"]) > 9]
    texts = [tokenizer.decode(row["input_ids"][:-1]) for row in known]
    assert len(texts) == 3
    wanted = recipe.prediction_columns(np.asarray(trainer.predict(known).predictions), data)
    found = recipe.prediction_columns(np.asarray(trainer.predict([{"text": each} for each in texts]).predictions), data)
    assert list(found["tokens"]) == list(wanted["tokens"]) == [len(row["input_ids"]) - 1 for row in known]
    assert found["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-4)
    assert np.exp(found["nats_per_token"]) == pytest.approx(found["perplexity"])
    # A text of several rows has the sums of its pieces.
    long = texts[0] * 40
    tokens = [*tokenizer(long)["input_ids"], end]
    whole = recipe.prediction_columns(np.asarray(trainer.predict([{"text": long}]).predictions), data)
    starts = range(0, len(tokens), 64)
    assert len(starts) > 2
    assert whole["tokens"][0] == len(tokens) - len(starts)
    pieces = [torch.tensor([tokens[start : start + 64]]) for start in starts if len(tokens) - start > 1]
    with torch.no_grad():
        nats = sum(float(model(input_ids=each, labels=each).loss) * (each.shape[1] - 1) for each in pieces)
    assert whole["nats_per_token"][0] * whole["tokens"][0] == pytest.approx(nats, rel=1e-4)
    # Each text is continued as it is alone, by as many tokens as its row asks for.
    asked = [{"text": text, "new_tokens": number} for text, number in zip([*texts, long], (5, 0, 9, 7), strict=True)]
    made = recipe.prediction_columns(np.asarray(trainer.predict(asked).predictions), data)
    assert list(made["tokens"][:3]) == list(found["tokens"][:3])
    for row, continuation in zip(asked, made["continuation"], strict=True):
        ids = torch.tensor([tokenizer(row["text"])["input_ids"][-(64 - 9) :]])
        if row["new_tokens"] == 0:
            assert continuation == ""
            continue
        alone = model.generate(input_ids=ids, max_new_tokens=row["new_tokens"], do_sample=False, pad_token_id=end)
        assert continuation == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)


def test_new_texts_that_cannot_be_measured_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    collate = prepared[0].collate_with(prepared[2])
    assert collate is not None
    for rows, words in (
        ([{"text": "a"}, {"text": " "}], "column 'text': the text is empty"),
        (
            [{"text": "a", "new_tokens": 64}],
            "column 'new_tokens': 64 is not a number of tokens from 0 on and below the 64",
        ),
        ([{"text": "a", "new_tokens": -1}], "column 'new_tokens': -1 is not a number"),
    ):
        with pytest.raises(DataError, match=words) as caught:
            collate(rows)
        assert caught.value.remedy
    (tmp_path / "texts.csv").write_text("\n".join(["text"] + ["some words and more of them"] * 20))
    recipe, _, data = prepare(tmp_path, str(tmp_path / "texts.csv"), overlong="refuse", pack=[], vocabulary=300)
    strict = recipe.collate_with(data)
    assert strict is not None
    with pytest.raises(DataError, match=r"the text has .* tokens, and a row has at most 64"):
        strict([{"text": "word " * 500}])


def test_tables_become_documents_and_lost_tokens_are_counted(tmp_path: Path) -> None:
    rows = ["text"] + ["some words and more of them"] * 20 + ["word " * 500]
    (tmp_path / "texts.csv").write_text("\n".join(rows))
    _, splits, data = prepare(tmp_path, str(tmp_path / "texts.csv"), overlong="drop", pack=[], vocabulary=300)
    counts = [data.info["packing"][name] for name in ("train", "test")]
    assert sum(each["documents_dropped"] for each in counts) == 1
    assert sum(each["tokens_lost"] for each in counts) > 64
    assert sum(each["documents"] for each in counts) == 21 == sum(map(len, splits.values())) + 1
    with pytest.raises(DataError, match="the document has") as caught:
        prepare(tmp_path, str(tmp_path / "texts.csv"), overlong=None)
    assert "texts.csv, row 20 (line 22)" in caught.value.message
    assert "overlong=split" in str(caught.value.remedy)


@pytest.fixture(scope="module")
def base(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer, as `save_pretrained` writes them."""
    recipe, _, data = prepared
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model: Any = recipe.build_model({"config": TINY}, data)
    model.save_pretrained(folder)
    for name in data.info["tokenizer"]:
        (folder / Path(name).name).write_bytes(data.read_file(name))
    return folder


def test_adapters_are_trained_saved_loaded_and_merged(prepared: Prepared, base: Path, tmp_path: Path) -> None:
    recipe, splits, data = prepared
    options = {"folder": base, "lora": {"r": 4}}
    model: Any = recipe.build_model(options, data)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    before = {name: each.clone() for name, each in model.named_parameters()}
    trainer = trainer_of(recipe, data, model, tmp_path / "run", splits["train"], 3)
    trainer.train()
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == trained
    trainer.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model" / "model.safetensors").exists()
    again: Any = recipe.build_model(options, data)
    load_weights(again, str(tmp_path / "model"))
    batch = {"input_ids": torch.arange(9)[None]}
    with torch.no_grad():
        wanted = model.eval()(**batch).logits
        torch.testing.assert_close(again.eval()(**batch).logits, wanted)
        torch.testing.assert_close(again.merge_and_unload()(**batch).logits, wanted)
    with pytest.raises(DamagedError, match="do not fit"):
        load_weights(recipe.build_model({"folder": base, "lora": {"r": 2}}, data), str(tmp_path / "model"))


def test_a_model_and_its_tokenizer_come_from_a_folder(base: Path, prepared: Prepared, tmp_path: Path) -> None:
    recipe, splits, data = prepare(tmp_path, folder=base)
    assert data.info["vocabulary"] == 400
    assert [row["input_ids"].tolist() for row in splits["train"]] == [
        row["input_ids"].tolist() for row in prepared[1]["train"]
    ]
    model: Any = recipe.build_model({"folder": base}, data)
    assert model.dtype == torch.float32
    with pytest.raises(ConfigError, match="reads at most 64 tokens") as caught:
        prepare(tmp_path, folder=base, length=65)
    assert caught.value.field == "prepare.options.length"


def refused_model(prepared: Prepared, options: dict[str, Any]) -> TrainflowError:
    with pytest.raises(ConfigError) as caught:
        prepared[0].build_model(options, prepared[2])
    assert caught.value.remedy
    return caught.value


def test_models_that_do_not_fit_are_refused(prepared: Prepared, base: Path, tmp_path: Path) -> None:
    assert "Adapters are for a model that has been trained" in refused_model(prepared, {"lora": {"r": 8}}).message
    assert refused_model(prepared, {"folder": base, "lora": {"rank": 8}}).field == "train.model.lora.rank"
    wrong = refused_model(prepared, {"folder": base, "lora": {"target_modules": ["nothing"]}})
    assert "peft cannot add the adapters" in wrong.message
    assert refused_model(prepared, {"folder": base, "dtype": "float23"}).remedy == 'Did you mean "float32"?'
    assert "its own configuration" in refused_model(prepared, {"folder": base, "config": TINY}).message
    assert "cannot load this model" in refused_model(prepared, {"folder": tmp_path / "nowhere"}).message
    mamba = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    assert "cannot train on packed rows" in refused_model(prepared, {"config": mamba}).message
    info = DataInfo(
        {"url": prepared[2].url, "info": {**prepared[2].info, "vocabulary": 500}, "splits": {}, "files": []}
    )
    with pytest.raises(ConfigError, match="knows 400 tokens, and the tokenizer of the data has 500"):
        prepared[0].build_model({"folder": base}, info)


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"lenght": 3}, "lenght", "no such option"),
        ({"length": 1}, "length", "two tokens"),
        ({"isolate": "masks"}, "isolate", "one of the choices"),
        ({"pack": ["trian"]}, "pack", "one of the choices"),
        ({"overlong": "cut"}, "overlong", "one of the choices"),
        ({"pretrained": "a", "folder": "b"}, "folder", "not both"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        prepare(tmp_path, "stdlib:json", **options)
    assert caught.value.field == f"prepare.options.{field}"
