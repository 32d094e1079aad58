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

Queries of a batch have to find their texts among those of the other queries (van den Oord et al., 2018): the larger
the batch of one device, the harder. One model embeds queries and texts; the cosine is what is near.

Without `pretrained` or `folder` the vocabulary is learned from the training texts, and the weights begin at random:
`train.model: {config: {model_type: bert, hidden_size: 128, …}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import ConfigError
from trainer_lib.recipes.shared.model_places import MODEL, build_with_head
from trainer_lib.recipes.shared.recipe_options import TEXTS, PathOptions, choose, require_choice
from trainer_lib.recipes.tables.rows import FIELD, TextRows
from trainer_lib.recipes.tables.table_files import note_form
from trainer_lib.recipes.texts.packed_batches import evaluating
from trainer_lib.recipes.texts.row_trainer import RowLossTrainer
from trainer_lib.recipes.texts.tokenizing import batch_texts, count_cut_texts, find_tokenizer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput


# -- ranks of the texts that belong to queries, among all candidates ---------------------------------------------------
# The rank of a row does not depend on which other rows are measured with it: a resample, or a slice, is measured
# against the same candidates as all of them; among its own it would have fewer, and better ranks.
_MOST_RANKS = (1, 5, 10)


def find_ranks(scores: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The rank from 1 of the candidate ``right[row]`` by scores ``[rows, candidates]``; of ties the mean."""
    of_right = scores[np.arange(len(scores)), right][:, None]
    higher, equal = (scores > of_right).sum(axis=1), (scores == of_right).sum(axis=1)
    ranks: np.ndarray = higher + (equal + 1) / 2
    return ranks


class Candidates:
    """The texts among which those that belong to queries are searched, with their embeddings ``[candidates, size]``.

    `batches` are those of a split, as `collate` makes them; `embed` makes embeddings of `input_ids` and
    `attention_mask` ``[texts, tokens]``.
    """

    def __init__(self, batches: Iterable[Any], embed: Callable[[Any], Tensor], vocabulary: int) -> None:
        from scipy import sparse

        self._number: dict[int, int] = {}
        self._vocabulary = vocabulary
        made: list[Tensor] = []
        tokens: list[Any] = []
        for batch in batches:
            new, rows = [], len(batch["labels"])
            for row, label in enumerate(batch["labels"].tolist()):
                if label not in self._number:
                    self._number[label] = len(self._number)
                    new.append(rows + row)
            if new:
                chosen = torch.tensor(new, device=batch["input_ids"].device)
                texts = {name: batch[name][chosen] for name in ("input_ids", "attention_mask")}
                made.append(embed(texts))
                tokens.append(self._which_tokens(texts))
        self.embeddings = torch.cat(made)
        candidates = sparse.vstack(tokens, "csr")
        self._tokens, self._lengths = candidates.T.tocsr(), np.sqrt(np.maximum(1, candidates.getnnz(axis=1)))

    def __len__(self) -> int:
        return len(self._number)

    def rights(self, labels: Tensor) -> Tensor:
        """The numbers of the rows' candidates ``[rows]``, given the labels."""
        return torch.tensor([self._number[label] for label in labels.tolist()], device=labels.device)

    def overlap_ranks(self, queries: Mapping[str, Tensor], rights: np.ndarray) -> np.ndarray:
        """The ranks ``[rows]`` by the tokens in common, divided by the root of those that the candidate has."""
        return find_ranks((self._which_tokens(queries) @ self._tokens).toarray() / self._lengths, rights)

    def _which_tokens(self, texts: Mapping[str, Tensor]) -> Any:
        """1 where a text has a token: a sparse matrix ``[texts, vocabulary]``."""
        from scipy import sparse

        ids, mask = texts["input_ids"].cpu().numpy(), texts["attention_mask"].cpu().numpy()
        rows, columns = np.nonzero(mask)
        found = sparse.csr_matrix((np.ones(len(rows)), (rows, ids[rows, columns])), (len(ids), self._vocabulary))
        found.data[:] = 1  # a token that a text has twice was added up
        return found


# -- the recipe -------------------------------------------------------------------------------------------------------
class TextsToFind(TextRows):
    """The pairs of a table by split."""

    text_options = ("query", "positive")
    label_option = "positive"
    defaults: Mapping[str, Any] = {
        **TEXTS,
        "query": "query",  # column with the queries
        "positive": "positive",  # column with the texts that belong to them
        "query_prefix": "",  # is put before a query, for models that expect it
        "positive_prefix": "",  # is put before a text that belongs to one
    }


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the pairs and find a tokenizer for them.

    Returns:
        For every split its rows: both texts by the names of their columns; in `labels` the number of the text that
        belongs to a query, among the different ones of the split; `row_id`.

    Raises:
        ConfigError: a split has one text only, so that there is nothing to tell it from.
    """
    table = TextsToFind(options, out)
    chosen = table.options
    queries, positives = table.texts_of("query"), table.texts_of("positive")
    learned = (text for row in table.splits["train"].tolist() for text in (queries[row], positives[row]))
    tokenizer = find_tokenizer(chosen, learned, out)
    labels = np.zeros(len(queries), np.int64)
    for split, rows in table.splits.items():
        numbers: dict[str, int] = {}
        for row in rows.tolist():
            labels[row] = numbers.setdefault(positives[row], len(numbers))
        if len(numbers) < 2:
            what = f"All rows of the split '{split}' have one text, so there is nothing to tell it from."
            raise ConfigError(what, field=f"{FIELD}.positive", value=table.label, remedy="Give rows with other texts.")
    out.info.update(
        {name: chosen[name] for name in ("query", "positive", "query_prefix", "positive_prefix", "max_length")},
        **note_form({chosen["query"]: "text"}, chosen),
    )
    texts = [chosen["query_prefix"] + text for text in queries]
    texts += [chosen["positive_prefix"] + text for text in positives]
    count_cut_texts(out, tokenizer, texts, longest=chosen["max_length"])
    return table.rows(labels.tolist(), {chosen["query"]: queries, chosen["positive"]: positives})


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration; with adapters on request.

    Raises:
        ConfigError: transformers cannot load it, or a setting is not one of its choices.
    """
    defaults = {
        **MODEL,
        "pooling": "mean",  # the vector of a text is the mean of its tokens' vectors, or the first one
        "temperature": 0.05,  # divides cosines in the loss; a smaller one looks at harder texts more
    }
    chosen = choose(options, defaults, field="train.model")
    require_choice(chosen["pooling"], ("mean", "first"), field="train.model.pooling")
    if chosen["temperature"] <= 0:
        remedy = "Give a number above 0, such as 0.05."
        what = "Cosines cannot be divided by this."
        raise ConfigError(what, field="train.model.temperature", value=chosen["temperature"], remedy=remedy)
    model = build_with_head(chosen, data, head="", task="FEATURE_EXTRACTION")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # type: ignore[assignment]  # its weights would never be trained
    config: Any = model.config
    config.embedding_pooling, config.embedding_temperature = chosen["pooling"], float(chosen["temperature"])
    return model


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch: `labels` ``[rows]``, and `input_ids` and `attention_mask` ``[2 rows, tokens]``.

    The first half of the texts are the queries, the second half what belongs to them. New rows have queries alone.
    `is_right` ``[rows, rows]``: which texts of the batch are not wrong for a query.
    """
    info, has_both = data.info, "labels" in rows[0]
    texts = [info["query_prefix"] + row[info["query"]] for row in rows]
    if has_both:
        texts += [info["positive_prefix"] + row[info["positive"]] for row in rows]
    made = batch_texts(data, texts)
    batch = {name: made[name] for name in ("input_ids", "attention_mask")}
    if not has_both:
        return batch
    labels = torch.tensor([row["labels"] for row in rows])
    pairs = [(row[info["query"]], row[info["positive"]]) for row in rows]
    return {"labels": labels, **batch, "is_right": _find_right(pairs)}


def _find_right(pairs: Sequence[tuple[str, str]]) -> Tensor:
    """The texts that are not wrong for a query: of an equal query, or the query itself; bool ``[rows, rows]``."""
    numbers: dict[str, int] = {}
    queries, texts = np.array([[numbers.setdefault(text, len(numbers)) for text in pair] for pair in pairs]).T
    first = queries * len(numbers)
    return torch.from_numpy(np.isin(first[:, None] + texts, np.concatenate([first + texts, first + queries])))


class Trainer(RowLossTrainer):
    """A Trainer that tells the texts of a batch apart, and ranks them among all texts of a split in evaluation."""

    _candidates: Candidates | None = None

    @override
    def judge(self, model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        queries, positives = self._embed(inputs, model).chunk(2)
        return self._contrast(queries, positives, inputs["is_right"]), queries

    @override
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, str):
            rows = self.eval_dataset[rows]
        if isinstance(rows, Mapping):  # they come here one by one
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        size = self.args.eval_batch_size
        parts = (range(start, min(start + size, len(rows))) for start in range(0, len(rows), size))
        batches = (self.data_collator([rows[row] for row in part]) for part in parts)
        with evaluating(self.model):
            config: Any = self.model.config
            self._candidates = Candidates(map(self._prepare_inputs, batches), self._embed, config.vocab_size)
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._candidates = None

    @override
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        rows = len(inputs["labels"]) if "labels" in inputs else len(inputs["input_ids"])
        with torch.no_grad():
            texts = {name: inputs[name][:rows] for name in ("input_ids", "attention_mask")}
            queries = self._embed(texts, model)
            if self._candidates is None or "labels" not in inputs:
                return None, queries, None
            known, labels = self._candidates, inputs["labels"]
            right = known.rights(labels)
            loss = self._contrast(queries, known.embeddings[right], inputs["is_right"]).mean()
            scores = (queries @ known.embeddings.T).float().cpu().numpy()
        rights, device = right.cpu().numpy(), queries.device
        ranks, overlap = find_ranks(scores, rights), known.overlap_ranks(texts, rights)
        others = np.stack((overlap, np.full(rows, len(known), np.float64)), axis=1)
        return loss, torch.tensor(ranks, device=device), torch.tensor(others, device=device)

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

    def _contrast(self, queries: Tensor, positives: Tensor, is_right: Tensor) -> Tensor:
        """The losses of queries ``[rows]``; a text that is right for one is not compared with its own."""
        config: Any = self.model.config
        scores = queries @ positives.T / config.embedding_temperature
        right = torch.arange(len(scores), device=scores.device)
        others = is_right & (right[:, None] != right)
        return nn.functional.cross_entropy(scores.masked_fill(others, -torch.inf), right, reduction="none")


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure reciprocal ranks and recall, next to those of the ranks by the tokens in common, and chance.

    Predictions are ranks ``[rows]``, labels ``[rows, 2]``: the ranks by the tokens in common, and how many candidates
    there are. `mrr_over_overlap` is what the model is better by.
    """
    ranks, (overlap, candidates) = np.asarray(evaluation.predictions), np.asarray(evaluation.label_ids).T
    mrr, overlap_mrr = (float((1 / np.asarray(values, np.float64)).mean()) for values in (ranks, overlap))
    return {
        "mrr": mrr,
        **{f"recall_at_{most}": float((ranks <= most).mean()) for most in _MOST_RANKS},
        "overlap_mrr": overlap_mrr,
        **{f"overlap_recall_at_{most}": float((overlap <= most).mean()) for most in _MOST_RANKS},
        "mrr_over_overlap": mrr - overlap_mrr,
        "chance_recall_at_10": float(np.minimum(1, 10 / candidates).mean()),
        "candidates": float(candidates.max()),
    }


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Give embeddings ``[rows, size]`` the name of their column."""
    return {"embedding": list(np.asarray(predictions, np.float32))}
