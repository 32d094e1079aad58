"""The recipe embeddings: vectors of texts that are near where texts belong together, with a model of transformers.

    name: search
    recipe: embeddings
    prepare:
      sources: [questions.csv]
      options: {query: question, positive: passage, pretrained: sentence-transformers/all-MiniLM-L6-v2}
    train:
      model: {pretrained: sentence-transformers/all-MiniLM-L6-v2}
      args: {num_train_epochs: 1, learning_rate: 2.0e-5, global_batch_size: 64}
    evaluate: {splits: [validation, test]}

Each query of a batch has to find its text among those of the other queries (van den Oord et al., 2018): the larger
the batch of one device, the harder. One model embeds queries and texts; the cosine is what is near.

Without `pretrained` or `folder` the vocabulary is learned from the training texts, and the weights begin at random:
`train.model: {config: {model_type: bert, hidden_size: 128, …}}`.

To replace a function, import the others into a file of your own, and define yours behind them::

    from trainer_lib.recipes.embeddings import *
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.errors import ConfigError
from trainer_lib.outputs import EvalPrediction
from trainer_lib.recipes.classifier_models import MODEL, build_with_head
from trainer_lib.recipes.model_places import one_of
from trainer_lib.recipes.option_names import choose, require_choice
from trainer_lib.recipes.paired_texts import COMMON, PairedTexts
from trainer_lib.recipes.retrieval import Candidates, find_ranks, in_batches, measure_ranks
from trainer_lib.recipes.table_form import note_form
from trainer_lib.recipes.tabular_rows import FIELD
from trainer_lib.recipes.tokenizing import (
    count_cut_texts,
    keep_tokenizer,
    kept_tokenizer,
    learn_tokenizer,
    load_tokenizer,
)
from trainer_lib.trainer import Trainer as PlainTrainer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

POOLINGS = ("mean", "first")


class Options(TypedDict):
    """The options of `prepare`; `rename`, `id`, `files` and `split` are as of a table."""

    query: NotRequired[str]
    """Column with the queries."""
    positive: NotRequired[str]
    """Column with the texts that belong to them."""
    query_prefix: NotRequired[str]
    """What stands before a query, for models that expect it."""
    positive_prefix: NotRequired[str]
    """What stands before a text that belongs to one."""
    pretrained: NotRequired[str]
    """Name of the model on the Hub whose tokenizer is used."""
    folder: NotRequired[Path]
    """Folder of the model whose tokenizer is used."""
    files: NotRequired[dict[str, Path]]
    """Split -> its file."""
    pad_token: NotRequired[str]
    """Token that fills up short texts, for a tokenizer that has none."""
    vocabulary: NotRequired[int]
    """Tokens of a vocabulary that is learned."""
    max_length: NotRequired[int]
    """Tokens of a text; longer ones are cut."""


class ModelOptions(TypedDict):
    """The settings of `build_model`."""

    pretrained: NotRequired[str]
    folder: NotRequired[Path]
    config: NotRequired[dict[str, Any]]
    lora: NotRequired[dict[str, Any]]
    """Train adapters of this form in place of all weights."""
    pooling: NotRequired[str]
    """What of the tokens' vectors is the text's: their mean, or the first one."""
    temperature: NotRequired[float]
    """What cosines are divided by in the loss; smaller looks at harder texts more."""


class TextsToFind(PairedTexts):
    """The pairs of a table by split."""

    text_option = "query"
    label_option = "positive"
    reserved = ("labels", "row_id", "place")
    defaults: Mapping[str, Any] = {
        **COMMON,
        "query": "query",
        "positive": "positive",
        "query_prefix": "",
        "positive_prefix": "",
    }


def prepare(options: Options, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the pairs and find a tokenizer for them.

    Returns:
        For every split its rows: both texts by the names of their columns; in `labels` the number of the text that
        belongs to a query, among the different ones of the split; in `place` the row's number in the split; `row_id`.

    Raises:
        ConfigError: a split has one text only, so that there is nothing to tell it from.
    """
    table = TextsToFind(options, out, classes=False)
    chosen = table.options
    queries, positives = table.pairs()
    place = one_of(chosen, field=FIELD)
    if place is None:
        texts = [text for row in table.splits["train"].tolist() for text in (queries[row], positives[row])]
        tokenizer = learn_tokenizer(texts, vocabulary=chosen["vocabulary"], max_length=chosen["max_length"])
    else:
        tokenizer = load_tokenizer(place, pad_token=chosen["pad_token"], field=FIELD)
    labels, places = np.zeros(len(queries), np.int64), np.zeros(len(queries), np.int64)
    for split, rows in table.splits.items():
        numbers: dict[str, int] = {}
        for number, row in enumerate(rows.tolist()):
            labels[row], places[row] = numbers.setdefault(positives[row], len(numbers)), number
        if len(numbers) < 2:
            what = f"All rows of the split '{split}' have one text, so there is nothing to tell it from."
            raise ConfigError(what, field=f"{FIELD}.positive", value=table.label, remedy="Give rows with other texts.")
    out.info.update(
        {name: chosen[name] for name in ("query", "positive", "query_prefix", "positive_prefix", "max_length")},
        vocabulary=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=keep_tokenizer(tokenizer, out),
        **note_form({chosen["query"]: "text"}, chosen),
    )
    texts = [chosen["query_prefix"] + text for text in queries]
    texts += [chosen["positive_prefix"] + text for text in positives]
    count_cut_texts(out, tokenizer, texts, longest=chosen["max_length"])
    return table.rows(
        labels.tolist(),
        {chosen["query"]: queries, chosen["positive"]: positives, "place": places.tolist()},
    )


def build_model(options: ModelOptions, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration; with adapters if `lora` is given.

    Raises:
        ConfigError: transformers cannot load it, or a setting is not one of its choices.
    """
    own = {"pooling": "mean", "temperature": 0.05}
    defaults = {**{name: MODEL[name] for name in ("pretrained", "folder", "config", "lora")}, **own}
    chosen = choose(options, defaults, field="train.model")
    require_choice(chosen["pooling"], POOLINGS, field="train.model.pooling")
    if chosen["temperature"] <= 0:
        remedy = "Give a number above 0, such as 0.05."
        what = "Cosines cannot be divided by this."
        raise ConfigError(what, field="train.model.temperature", value=chosen["temperature"], remedy=remedy)
    model: Any = build_with_head(chosen, data, head="", task="FEATURE_EXTRACTION")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # its weights would never be trained
    model.config.embedding_pooling = chosen["pooling"]
    model.config.embedding_temperature = float(chosen["temperature"])
    built: nn.Module = model
    return built


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch: `places` and `labels` ``[rows]``, and `input_ids` and `attention_mask` ``[2 rows, tokens]``.

    The first half of the texts are the queries, the second half what belongs to them. New rows have queries alone.
    """
    info, has_both = data.info, "labels" in rows[0]
    texts = [info["query_prefix"] + row[info["query"]] for row in rows]
    if has_both:
        texts += [info["positive_prefix"] + row[info["positive"]] for row in rows]
    made = kept_tokenizer(data)(
        texts, padding=True, truncation=True, max_length=info["max_length"], return_tensors="pt"
    )
    batch = {name: made[name] for name in ("input_ids", "attention_mask")}
    if not has_both:
        return batch
    numbers = {
        name: torch.tensor([row[column] for row in rows])
        for name, column in (("places", "place"), ("labels", "labels"))
    }
    return {**numbers, **batch}


class Trainer(PlainTrainer):
    """A Trainer that tells the texts of a batch apart, and ranks them among all texts of a split in evaluation."""

    _candidates: Candidates | None = None

    @override
    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        queries, positives = self._embed(inputs, model).chunk(2)
        losses = self._contrast(queries, positives, inputs["labels"])
        loss = losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch
        return (loss, {"loss": loss, "embeddings": queries}) if return_outputs else loss

    @override
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = self.eval_dataset[rows]
        if isinstance(rows, Mapping):  # each of them comes here alone
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        was_training = self.model.training
        self.model.eval()
        try:
            batches = (self.data_collator(some) for some in in_batches(rows, self.args.eval_batch_size))
            with torch.no_grad():
                self._candidates = Candidates((self._prepare_inputs(batch) for batch in batches), self._embed)
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._candidates = None
            self.model.train(was_training)

    @override
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        rows = len(inputs["labels"]) if "labels" in inputs else len(inputs["input_ids"])
        with torch.no_grad():
            queries = self._embed({name: inputs[name][:rows] for name in ("input_ids", "attention_mask")}, model)
            if self._candidates is None or "labels" not in inputs:
                return None, queries, None
            known, labels = self._candidates, inputs["labels"]
            right = known.rights(labels)
            loss = self._contrast(queries, known.embeddings[right], labels).mean()
            scores = (queries @ known.embeddings.T).float().cpu().numpy()
        ranks = find_ranks(scores, right.cpu().numpy())
        others = [[known.overlap[place], len(known)] for place in inputs["places"].tolist()]
        device = queries.device
        return loss, torch.tensor(ranks, device=device), torch.tensor(others, dtype=torch.float64, device=device)

    def _embed(self, inputs: Any, model: nn.Module | None = None) -> Tensor:
        """The embeddings of texts ``[texts, size]``, of length 1."""
        mask = inputs["attention_mask"]
        with self.autocast_smart_context_manager():
            hidden = (model or self.model)(input_ids=inputs["input_ids"], attention_mask=mask)[0]
        config: Any = self.model.config
        if config.embedding_pooling == "first":
            pooled = hidden[torch.arange(len(mask), device=mask.device), mask.argmax(dim=1)]
        else:
            weights = mask[..., None].to(hidden.dtype)
            pooled = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        return nn.functional.normalize(pooled.float(), dim=-1)

    def _contrast(self, queries: Tensor, positives: Tensor, labels: Tensor) -> Tensor:
        """The loss of each query ``[rows]``; a text that belongs to it twice in the batch is not a wrong one."""
        config: Any = self.model.config
        scores = queries @ positives.T / config.embedding_temperature
        is_same = (labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        right = torch.arange(len(labels), device=labels.device)
        return nn.functional.cross_entropy(scores.masked_fill(is_same, -torch.inf), right, reduction="none")


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure ranks ``[rows]``, beside those by the tokens in common ``[rows, 2]`` (rank, candidates)."""
    overlap, candidates = np.asarray(evaluation.label_ids).T
    return measure_ranks(np.asarray(evaluation.predictions), overlap, candidates)


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Give embeddings ``[rows, size]`` the name of their column."""
    return {"embedding": list(np.asarray(predictions, np.float32))}
