"""The recipe causal-language-modeling: a model that continues texts, from scratch or fine-tuned, whole or by LoRA.

    name: notes
    recipe: causal-language-modeling
    prepare:
      sources: [notes/]  # texts; tables with `text: COLUMN`; stdlib:, package:NAME
      options: {length: 512, overlong: split, pretrained: gpt2}
    train:
      model: {pretrained: gpt2, lora: {r: 8}}
      args: {num_train_epochs: 3, learning_rate: 2.0e-4, global_batch_size: 8}
    evaluate: {splits: [validation, test]}

Without `pretrained` or `folder` a byte-level vocabulary is learned from the training texts, and the weights begin at
random: `train.model: {config: {model_type: llama, hidden_size: 256, …}}`. Training texts are packed into full rows;
the others have a row each.

To replace a function, import the others into a file of your own, and define yours behind them::

    from trainer_lib.recipes.causal_language_modeling import *
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib.errors import ConfigError
from trainer_lib.outputs import EvalPrediction
from trainer_lib.recipes.held_out_metrics import measure_tokens
from trainer_lib.recipes.lora_adapters import add_adapters
from trainer_lib.recipes.model_places import one_of
from trainer_lib.recipes.option_names import choose, require_choice
from trainer_lib.recipes.packed_batches import (
    NO_TARGET,
    WAYS,
    collate_documents,
    collate_packed,
    require_isolation,
)
from trainer_lib.recipes.packing import new_counts, pack_documents
from trainer_lib.recipes.text_documents import FIELD, DocumentSplits
from trainer_lib.recipes.tokenizing import (
    import_transformers,
    keep_tokenizer,
    kept_tokenizer,
    learn_byte_tokenizer,
    no_model,
    open_tokenizer,
    tokenize_documents,
)

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

DEFAULTS: dict[str, Any] = {
    "text": "text",
    "rename": {},
    "separator": None,
    "files": {},
    "split": {},
    "pretrained": None,
    "folder": None,
    "vocabulary": 4096,
    "length": 512,
    "overlong": None,
    "pack": ["train"],
    "isolate": "positions",
}
"""Every option of `prepare`, with its default."""
MODEL: dict[str, Any] = {"pretrained": None, "folder": None, "config": {}, "lora": {}, "dtype": "float32"}
"""The settings of `build_model` (`train.model`), with their defaults."""
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
"""The model that is built at random where `config` says nothing else."""
DTYPES = ("float32", "bfloat16", "float16", "auto")


class Options(TypedDict):
    """The options of `prepare`; `split` cuts by random, group, time or column."""

    text: NotRequired[str]
    """Column of a table that has the texts."""
    rename: NotRequired[dict[str, str]]
    separator: NotRequired[str]
    """What stands between two documents of a text file; unset: a file is one."""
    files: NotRequired[dict[str, Path]]
    """Split -> its file."""
    split: NotRequired[dict[str, Any]]
    pretrained: NotRequired[str]
    """Name of the model on the Hub whose tokenizer is used."""
    folder: NotRequired[Path]
    """Folder of the model whose tokenizer is used."""
    vocabulary: NotRequired[int]
    """Tokens of a vocabulary that is learned."""
    length: NotRequired[int]
    """The most tokens of a row."""
    overlong: NotRequired[str]
    """What becomes of longer documents: split, drop or refuse."""
    pack: NotRequired[list[str]]
    """Splits whose documents share rows."""
    isolate: NotRequired[str]
    """How documents of a row are kept apart: positions or mask."""


class ModelOptions(TypedDict):
    """The settings of `build_model`."""

    pretrained: NotRequired[str]
    folder: NotRequired[Path]
    config: NotRequired[dict[str, Any]]
    lora: NotRequired[dict[str, Any]]
    """Train adapters of this form instead of the model's weights."""
    dtype: NotRequired[str]
    """Type of a loaded model's weights."""


def prepare(options: Options, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the texts, find a tokenizer for them, and make rows of tokens.

    Returns:
        For every split its rows, as `pack_documents` makes them.
    """
    chosen = choose(options, DEFAULTS, field=FIELD)
    require_choice(chosen["isolate"], WAYS, field=f"{FIELD}.isolate")
    if chosen["length"] < 2:
        what = "A row needs two tokens, because the first one is not predicted."
        raise ConfigError(what, field=f"{FIELD}.length", value=chosen["length"], remedy="Give 2 or more.")
    place = one_of(chosen, field=FIELD)
    if place is not None:
        _require_positions(place, chosen["length"])
    texts = DocumentSplits(chosen, out.sources)
    for name in chosen["pack"]:
        require_choice(name, tuple(texts.names), field=f"{FIELD}.pack")
    if place is None:
        train = (document.text for document in texts.read("train"))
        tokenizer = learn_byte_tokenizer(train, vocabulary=chosen["vocabulary"])
    else:
        tokenizer = open_tokenizer(place, field=FIELD)
    counts = {name: new_counts() for name in texts.names}
    out.info.update(
        length=chosen["length"],
        packed=chosen["pack"],
        isolate=chosen["isolate"],
        packing=counts,  # complete when all rows were read
        vocabulary=len(tokenizer),
        ends={name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        tokenizer=keep_tokenizer(tokenizer, out),
    )
    return {
        name: pack_documents(
            tokenize_documents(texts.read(name), tokenizer),
            length=chosen["length"],
            overlong=chosen["overlong"],
            packed=name in chosen["pack"],
            counts=counts[name],
        )
        for name in texts.names
    }


def _require_positions(place: str, length: int) -> None:
    """Refuse rows that are longer than the model can read, where it says how much that is."""
    try:
        config = import_transformers().AutoConfig.from_pretrained(place)
    except (OSError, ValueError):
        return  # a tokenizer may be alone in its folder
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and length > most:
        what = f"The model reads at most {most:,} tokens."
        raise ConfigError(what, field=f"{FIELD}.length", value=length, remedy=f"Give at most {most}.")


def build_model(options: ModelOptions, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration; with adapters if `lora` is given.

    Raises:
        ConfigError: transformers cannot load it, it does not know all tokens, or mixes the documents of a row.
    """
    chosen = choose(options, MODEL, field="train.model")
    require_choice(chosen["dtype"], DTYPES, field="train.model.dtype")
    place = one_of(chosen, field="train.model")
    model = _new_model(chosen["config"], data) if place is None else _load_model(place, chosen, data)
    model.config.use_cache = False  # training has no use for it, and it hides positions from the mask
    if chosen["lora"]:
        if place is None:
            what = "Adapters are for a model that has been trained."
            raise ConfigError(what, field="train.model.lora", remedy="Give train.model.pretrained or folder as well.")
        model = add_adapters(model, chosen["lora"])
    if data.info["packed"]:
        info = data.info
        require_isolation(model, vocabulary=info["vocabulary"], length=info["length"], isolate=info["isolate"])
    built: nn.Module = model
    return built


def _new_model(config: Mapping[str, Any], data: DataInfo) -> Any:
    library = import_transformers()
    given = {"max_position_embeddings": data.info["length"], "vocab_size": data.info["vocabulary"], **data.info["ends"]}
    return library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(**{**SMALL, **given, **config}))


def _load_model(place: str, chosen: Mapping[str, Any], data: DataInfo) -> Any:
    if chosen["config"]:
        what = "A model that is loaded has its own configuration."
        raise ConfigError(what, field="train.model.config", value=chosen["config"], remedy="Remove it.")
    try:
        model = import_transformers().AutoModelForCausalLM.from_pretrained(place, dtype=chosen["dtype"])
    except (OSError, ValueError) as error:
        raise no_model(place, error, field="train.model") from error
    known = model.get_input_embeddings().num_embeddings
    if known < data.info["vocabulary"]:
        what = f"The model knows {known:,} tokens, and the tokenizer of the data has {data.info['vocabulary']:,}."
        remedy = "Name one model in train.model and in prepare.options."
        raise ConfigError(what, field="train.model", value=place, remedy=remedy)
    return model


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch of `input_ids`, `labels`, and `position_ids` or `attention_mask` ``[batch, tokens]``."""
    pad = data.info["ends"]["pad_token_id"] or 0  # is never a target
    if any(len(row["lengths"]) > 1 for row in rows):
        return collate_packed(rows, pad=pad, isolate=data.info["isolate"])
    return collate_documents(rows, pad=pad)


def preprocess_logits_for_metrics(logits: Tensor, labels: Tensor) -> Tensor:
    """Reduce logits ``[batch, tokens, vocabulary]`` to ``[batch, 2]``: a row's negative log-likelihood, and targets."""
    targets = labels[:, 1:]
    scores = logits[:, :-1].transpose(1, 2).float()
    nats = nn.functional.cross_entropy(scores, targets, ignore_index=NO_TARGET, reduction="none")
    return torch.stack((nats.sum(dim=1), (targets != NO_TARGET).sum(dim=1).to(nats.dtype)), dim=1)


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure the perplexity, beside that of the rows' own frequencies of tokens."""
    return measure_tokens(evaluation.predictions, evaluation.label_ids)


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn ``[rows, 2]`` into columns: the targets of each row, and its perplexity (1 for a row without any)."""
    nats, targets = predictions.astype(np.float64).T
    return {"tokens": targets.astype(np.int64), "perplexity": np.exp(np.minimum(nats / np.maximum(targets, 1), 700))}


def after_evaluate(model: nn.Module, data: DataInfo, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Continue the texts of `evaluate.options.prompts`, each by the most likely tokens, into `samples.txt`."""
    chosen = choose(options, {"prompts": [], "sample_tokens": 64}, field="evaluate.options")
    if not chosen["prompts"]:
        return {}
    tokenizer, generator = kept_tokenizer(data), model
    samples = []
    for prompt in chosen["prompts"]:
        given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(next(model.parameters()).device)
        made = generator.generate(  # type: ignore[operator]
            **given,
            max_new_tokens=chosen["sample_tokens"],
            do_sample=False,
            pad_token_id=data.info["ends"]["eos_token_id"],
        )
        samples.append(tokenizer.decode(made[0], skip_special_tokens=True))
    return {"files": {"samples.txt": ("\n" + "-" * 80 + "\n").join(samples).encode()}}
