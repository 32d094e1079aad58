"""The recipe sequence-to-sequence: texts to other texts (summaries, translations), with a model of transformers.

    name: summaries
    recipe: sequence-to-sequence
    prepare:
      sources: [articles.csv]
      options: {text: article, target: summary, prefix: "summarize: ", pretrained: t5-small}
    train:
      model: {pretrained: t5-small}
      args: {num_train_epochs: 3, learning_rate: 3.0e-4, global_batch_size: 16}
    evaluate: {splits: [validation, test]}

Without `pretrained` or `folder` a byte-level vocabulary is learned from the training texts, and the weights begin at
random: `train.model: {config: {model_type: t5, d_model: 128, …}}`. Evaluate and predict generate texts, by the most
likely token each, or with `train.model.beams`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.recipes.shared.model_places import MODEL, build_with_head, one_of
from trainer_lib.recipes.shared.recipe_options import TEXTS, PathOptions, choose
from trainer_lib.recipes.tables.rows import TextRows
from trainer_lib.recipes.tables.table_files import note_form
from trainer_lib.recipes.texts import tokenizing
from trainer_lib.recipes.texts.packed_batches import NO_TARGET
from trainer_lib.recipes.texts.row_trainer import RowTrainer, decode_texts, encode_texts, pad_rows

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput


# -- scores of texts that were written --------------------------------------------------------------------------------
# ROUGE-L is the F measure of the longest common subsequence of words (Lin, 2004); it knows Latin letters and digits.
# chrF is that of n-grams of up to 6 characters (Popović, 2015), here the mean over rows, and without those that are
# longer than the text to write. Both are from 0 to 1, and by torchmetrics.
NAMES = ("exact_match", "rouge_l", "chrf", "lead_rouge_l", "lead_chrf")
_LONGEST = 6


def score_text(written: str, wanted: str) -> tuple[float, float, float]:
    """Exact match, ROUGE-L and chrF of one text; spaces at its ends do not count."""
    from torchmetrics.functional.text import chrf_score, rouge_score

    own, true = written.strip(), wanted.strip()
    if not own or not true:
        return (float(own == true),) * 3
    longest = min(_LONGEST, len(true.replace(" ", "")))  # a short text has no longer n-grams
    rouge = rouge_score(own, true, rouge_keys="rougeL")["rougeL_fmeasure"]
    chrf: Any = chrf_score([own], [[true]], longest, 0)
    return float(own == true), float(rouge), float(chrf)


# -- the recipe -------------------------------------------------------------------------------------------------------
class TextsToWrite(TextRows):
    """The pairs of a table by split."""

    text_options = ("text", "target")
    label_option = "target"
    defaults: Mapping[str, Any] = {
        **TEXTS,
        "text": None,  # column with the texts to read
        "target": None,  # column with the texts to write
        "prefix": "",  # is put before all texts to read, for models that need the name of their task
        "target_length": 64,  # tokens of a text to write; longer ones are cut
    }


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the pairs and find a tokenizer for them.

    Returns:
        For every split its rows: the text to read by the name of its column, that to write in `labels`; `row_id`.
    """
    table = TextsToWrite(options, out)
    chosen = table.options
    texts, targets = table.texts_of("text"), table.texts_of("target")
    train = table.splits["train"].tolist()
    learned = (text for row in train for text in (chosen["prefix"] + texts[row], targets[row]))
    tokenizer = tokenizing.find_tokenizer(chosen, learned, out, of_bytes=True)
    out.info.update(
        {name: chosen[name] for name in ("text", "prefix", "max_length", "target_length")},
        label=table.label,
        lead_words=int(np.median([len(targets[row].split()) for row in train])),
        eos_token_id=tokenizer.eos_token_id,
        **note_form({chosen["text"]: "text"}, chosen),
    )
    read = [chosen["prefix"] + text for text in texts]
    tokenizing.count_cut_texts(out, tokenizer, read, longest=chosen["max_length"], more=" to read")

    def with_ends(some: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": _tokens_of(some, tokenizer)}

    most = chosen["target_length"]
    tokenizing.count_cut_texts(out, with_ends, targets, longest=most, kind="targets", more=" to write")
    return table.rows(targets, {chosen["text"]: texts})


def _tokens_of(targets: Sequence[str], tokenizer: Any, longest: int | None = None) -> list[list[int]]:
    """The tokens of texts to write, with the token for the end behind them."""
    end, settings = tokenizer.eos_token_id, {"truncation": longest is not None, "max_length": longest}
    made = tokenizer(text_target=list(targets), verbose=False, **settings)["input_ids"]
    if end is None:
        return list(made)
    room = None if longest is None else longest - 1
    return [tokens if tokens[-1:] == [end] else [*tokens[:room], end] for tokens in made]


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration; with adapters on request.

    Args:
        options: the settings of `model_places.MODEL`, and `beams`: texts that are followed at a time in generation.

    Raises:
        ConfigError: transformers cannot load it.
    """
    chosen, ends = choose(options, {**MODEL, "beams": 1}, field="train.model"), {}
    if one_of(chosen, field="train.model") is None:
        pad, end = data.info["pad_token_id"], data.info["eos_token_id"]
        ends = {"eos_token_id": end, "decoder_start_token_id": pad, "bos_token_id": None, "forced_eos_token_id": None}
    small = {"model_type": "t5", "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    model = build_with_head(chosen, data, head="ForSeq2SeqLM", task="SEQ_2_SEQ_LM", small=small, **ends)
    generation: Any = model.generation_config
    generation.max_length = None  # one limit
    generation.max_new_tokens = data.info["target_length"]
    generation.num_beams = chosen["beams"]
    return model


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch: `input_ids` and `attention_mask` ``[batch, tokens]``, and labels ``[batch, target tokens]``.

    Beside them, and not for the model, code points ``[batch, characters]``: of the texts to write in `wanted`, and of
    the first words of the texts to read in `lead`.
    """
    info, texts = data.info, [row[data.info["text"]] for row in rows]
    batch = tokenizing.batch_texts(data, [info["prefix"] + text for text in texts])
    batch.pop("token_type_ids", None)
    if "labels" not in rows[0]:
        return batch
    tokens = _tokens_of([row["labels"] for row in rows], tokenizing.kept_tokenizer(data), info["target_length"])
    lead = [" ".join(text.split()[: info["lead_words"]]) for text in texts]
    return {
        **batch,
        "labels": pad_rows(tokens, NO_TARGET),
        "wanted": encode_texts([row["labels"] for row in rows]),
        "lead": encode_texts(lead),
    }


class Trainer(RowTrainer):
    """A Trainer whose predictions are generated texts."""

    kept = ("wanted", "lead")

    @override
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        loss = None
        if "labels" in inputs:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        if prediction_loss_only:
            return loss, None, None
        given = self._prepare_inputs({name: inputs[name] for name in ("input_ids", "attention_mask")})
        generator: Any = self.model
        with torch.no_grad(), self.autocast_smart_context_manager():
            tokens = generator.generate(**given)
        kept = tuple(inputs[name].to(tokens.device) for name in self.kept if name in inputs)
        return loss, tokens, kept or None


def compute_metrics(evaluation: EvalPrediction, data: DataInfo) -> dict[str, float]:
    """Compare generated tokens ``[rows, tokens]`` with the first words of the texts to read."""
    wanted, lead = evaluation.label_ids
    known: dict[tuple[bytes, ...], np.ndarray] = data.once("scores", dict)  # a bootstrap measures rows many times
    keys = [tuple(tokens.tobytes() for tokens in row) for row in zip(evaluation.predictions, wanted, lead, strict=True)]
    new = [row for row, key in enumerate(keys) if key not in known]
    if new:
        texts = _decode(evaluation.predictions[new], data), decode_texts(wanted[new]), decode_texts(lead[new])
        for row, text, target, first_words in zip(new, *texts, strict=True):
            known[keys[row]] = np.array([*score_text(text, target), *score_text(first_words, target)[1:]])
    means = dict(zip(NAMES, np.stack([known[key] for key in keys]).mean(axis=0).tolist(), strict=True))
    over_lead = {f"{name}_over_lead": means[name] - means[f"lead_{name}"] for name in ("rouge_l", "chrf")}
    return {**means, **over_lead}


def _decode(tokens: np.ndarray, data: DataInfo) -> list[str]:
    return list(map(str.strip, tokenizing.decode_tokens(tokens, data)))


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn tokens ``[rows, tokens]`` into texts."""
    return {"prediction": _decode(predictions, data)}
