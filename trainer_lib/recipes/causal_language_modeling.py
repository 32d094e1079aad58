"""The recipe causal-language-modeling: a model that continues texts, from scratch or fine-tuned, whole or by adapters.

    name: notes
    recipe: causal-language-modeling
    prepare:
      sources: [notes/]  # texts; tables with `text: COLUMN`; stdlib:, package:NAME
      options: {length: 512, overlong: split, pretrained: gpt2}
    train:
      model: {pretrained: gpt2, adapter: {kind: lora, rank: 8}}
      args: {num_train_epochs: 3, learning_rate: 2.0e-4, global_batch_size: 8}
    evaluate: {splits: [validation, test]}

Without `pretrained` or `folder` a byte-level vocabulary is learned from the training texts, and the weights begin at
random: `train.model: {config: {model_type: llama, hidden_size: 256, …}}`. Training texts are packed into full rows;
the others have one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.data.rows.mixture import SOURCE
from trainer_lib.recipes.shared import model_places
from trainer_lib.recipes.shared.recipe_options import PathOptions, choose, require_choice
from trainer_lib.recipes.tables.table_files import note_form
from trainer_lib.recipes.texts import packed_batches, tokenizing
from trainer_lib.recipes.texts.documents import FIELD, DocumentSplits
from trainer_lib.recipes.texts.judged_prompts import answer_prompts
from trainer_lib.recipes.texts.packed_batches import preprocess_logits_for_metrics  # noqa: F401 - of the recipe
from trainer_lib.recipes.texts.packing import new_counts, pack_documents
from trainer_lib.trainer import Trainer as PlainTrainer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

DEFAULTS: dict[str, Any] = {
    "text": "text",  # column of a table that has the texts
    "rename": {},  # name of a column in the files -> its name here
    "ignore": [],  # columns that are left out
    "read": {},  # how tables are written (`data.rows.reading.Reading`)
    "separator": None,  # between two documents of a text file; None: a file is one
    "files": {},  # split -> its file
    "split": {},  # by random, group, time or column (`trainer_lib.recipes.tables.splitting`)
    "pretrained": None,  # name of the model on the Hub whose tokenizer is used
    "folder": None,  # or its folder
    "vocabulary": 4096,  # tokens of a vocabulary that is learned
    "length": 512,  # the most tokens of a row
    "overlong": None,  # longer documents: split, drop or refuse
    "pack": ["train"],  # splits whose documents share rows
    "isolate": "positions",  # keeps documents of a row apart; or mask
}
"""Every option of `prepare`, with its default."""
_MOST_NATS = 700.0  # whose exponential is still a number


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the texts, find a tokenizer for them, and make rows of tokens.

    Returns:
        For every split its rows, as `pack_documents` makes them.
    """
    chosen = choose(options, DEFAULTS, field=FIELD)
    packed_batches.require_rows(chosen)
    place = model_places.require_positions(chosen, "length", field=FIELD)
    texts = DocumentSplits(chosen, out.sources, out.mixture)
    if place is None:
        train = (document.text for document in texts.read("train"))
        tokenizer = tokenizing.learn_byte_tokenizer(train, vocabulary=chosen["vocabulary"])
    else:
        tokenizer = tokenizing.open_tokenizer(place)
    tokenizing.note_tokenizer(tokenizer, out)
    counts = {name: new_counts() for name in texts.names}
    mixed = [SOURCE] if out.mixture else []  # new rows need not say where they are from
    out.info.update(
        {name: chosen[name] for name in ("length", "overlong", "text", "isolate")},
        new_columns={chosen["text"]: "string", packed_batches.NEW_TOKENS: "int64"},
        packed=chosen["pack"],
        packing=counts,  # complete when all rows were read
        ends={name: getattr(tokenizer, name) for name in model_places.ENDS},
        **note_form({}, chosen, optional=[chosen["text"], packed_batches.NEW_TOKENS, "input_ids", "lengths", *mixed]),
    )
    return {
        name: pack_documents(
            tokenizing.tokenize_documents(texts.read(name), tokenizer),
            length=chosen["length"],
            overlong=chosen["overlong"],
            packed=name in chosen["pack"],
            counts=counts[name],
        )
        for name in texts.names
    }


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration; with adapters on request.

    Raises:
        ConfigError: transformers cannot load it, it does not know all tokens, or mixes the documents of a row.
    """
    defaults = {
        **model_places.MODEL,
        "dtype": "float32",  # type of a loaded model's weights
    }
    chosen, info = choose(options, defaults, field="train.model"), data.info
    require_choice(chosen["dtype"], model_places.DTYPES, field="train.model.dtype")
    place = model_places.one_of(chosen, field="train.model")
    settings = model_places.quantized(chosen["load_in"], place=place, adapted=bool(chosen["adapter"]))
    if place is None:
        facts = {name: info[name] for name in ("length", "vocabulary", "ends")}
        model = model_places.new_causal_model(chosen["config"], **facts)
    else:
        known = {"dtype": chosen["dtype"], "vocabulary": info["vocabulary"], "settings": settings}
        model = model_places.load_causal_model(place, field="train.model", **known)
    model.config.use_cache = False  # training has no use for it, and it hides positions from the mask
    adapted = model_places.add_adapters(model, chosen["adapter"], place=place)
    if info["packed"]:
        packed_batches.require_isolation(adapted, **{name: info[name] for name in ("vocabulary", "length", "isolate")})
    return adapted


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch of `input_ids`, `labels`, and `position_ids` or `attention_mask` ``[batch, tokens]``.

    New rows may be texts, in their column; `collate_texts` says what their batch has.
    """
    if data.info["text"] in rows[0]:
        return packed_batches.collate_texts(rows, tokenizing.kept_tokenizer(data), data.info)
    return packed_batches.collate_rows(rows, data.info)


class Trainer(PlainTrainer):
    """A Trainer that continues new rows of text."""

    @override
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        if "wanted" not in inputs:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        batch = self._prepare_inputs(inputs)
        with torch.no_grad(), self.autocast_smart_context_manager():
            found = [packed_batches.row_likelihoods(model, batch)] if "row_of" in batch else []
            if "prompt_ids" in batch:
                prompts = batch["prompt_ids"], batch["prompt_mask"]
                found.append(packed_batches.continue_prompts(self.model, *prompts, batch["wanted"]))
        return None, torch.cat(found, dim=1), None


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure the perplexity, next to that of the tokens' own frequencies in these texts (a unigram model).

    Predictions begin with the negative log-likelihoods of the rows' targets together, and their number ``[rows, 2]``;
    labels are tokens ``[rows, tokens]``, negative where there is no target. `nats_below_unigram` is what the model is
    better by, per token; perplexities are the exponentials.
    """
    nats, targets = np.asarray(evaluation.predictions, np.float64)[:, :2].sum(axis=0)
    tokens, texts = np.asarray(evaluation.label_ids), np.asarray(evaluation.whole_labels)
    counts = np.bincount(texts[texts >= 0])
    logs = np.log(np.maximum(counts, 1) / max(counts.sum(), 1))
    mean, unigram = nats / max(targets, 1), float(-logs[tokens[tokens >= 0]].sum() / max((tokens >= 0).sum(), 1))
    return {
        "perplexity": float(np.exp(min(mean, _MOST_NATS))),
        "nats_per_token": float(mean),
        "unigram_perplexity": float(np.exp(unigram)),
        "nats_below_unigram": float(unigram - mean),
        "tokens": float(targets),
    }


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn ``[rows, 2]`` into columns: the targets of rows, and their perplexities (1 for a row without any).

    What else a row has are the tokens that continue it.
    """
    nats, targets = predictions[:, :2].astype(np.float64).T
    mean = nats / np.maximum(targets, 1)
    found: dict[str, Sequence[Any]] = {"tokens": targets.astype(np.int64), "nats_per_token": mean}
    found["perplexity"] = np.exp(np.minimum(mean, _MOST_NATS))
    if predictions.shape[1] > 2:
        found["continuation"] = tokenizing.decode_tokens(predictions[:, 2:].astype(np.int64), data)
    return found


def after_evaluate(model: nn.Module, data: DataInfo, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Continue `evaluate.options.prompts` before and after training (`trainer_lib.recipes.texts.judged_prompts`)."""
    tokenizer = tokenizing.kept_tokenizer(data)

    def ask(prompt: str) -> list[int]:
        tokens: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
        return tokens

    return answer_prompts(model, tokenizer, ask, data, options)
