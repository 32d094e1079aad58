"""The recipe token-classification: tags for the words of a row, with a model of transformers.

    name: entities
    recipe: token-classification
    prepare:
      sources: [sentences.jsonl]  # {"words": ["EU", "rejects"], "tags": ["B-ORG", "O"]}; Parquet; .conll, .iob, .bio
      options: {words: words, label: tags, pretrained: distilbert-base-cased}
    train:
      model: {pretrained: distilbert-base-cased}
      args: {num_train_epochs: 3, learning_rate: 5.0e-5, global_batch_size: 32}
    evaluate: {splits: [validation, test]}

Without `pretrained` or `folder` the vocabulary is learned from the training words, and the weights begin at random:
`train.model: {config: {model_type: bert, hidden_size: 128, …}}`. A word has the tag of its first token. A row with more
tokens than `max_length` becomes several sequences, so that all words have a tag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import DataError
from trainer_lib.recipes.shared.model_places import build_classifier
from trainer_lib.recipes.shared.recipe_options import TEXTS, PathOptions
from trainer_lib.recipes.tables.cells import read_texts
from trainer_lib.recipes.tables.rows import FIELD, TextRows
from trainer_lib.recipes.tables.table_files import SOURCES, Reader, note_form
from trainer_lib.recipes.texts.packed_batches import NO_TARGET
from trainer_lib.recipes.texts.row_trainer import RowTrainer, find_usual, pad_rows
from trainer_lib.recipes.texts.tokenizing import find_tokenizer, kept_tokenizer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

# -- metrics of tagged words, next to the tag that the word has had most often in training -----------------------------
# A word that training has not seen gets the most frequent tag of all. Entities are those of the tags B-NAME, I-NAME
# and O, perhaps with E-NAME or L-NAME (the last word) and S-NAME or U-NAME (the only one): an entity counts where its
# name and both of its ends are right (Tjong Kim Sang and De Meulder, CoNLL-2003).


_OUTSIDE, _USUAL = "O", "usual_tags"
_FIRST, _LAST = ("B-", "S-", "U-"), ("E-", "L-", "S-", "U-")


def _without_entity(classes: Sequence[str]) -> list[str]:
    return [name for name in classes if name != _OUTSIDE and not name.startswith(("I-", *_FIRST, *_LAST))]


def _score_entities(predicted: np.ndarray, truth: np.ndarray, classes: tuple[str, ...]) -> tuple[float, float, float]:
    rows = zip(predicted.astype(np.int64), truth.astype(np.int64), strict=True)
    counts = np.array([_count_entities(own.tobytes(), real.tobytes(), classes) for own, real in rows]).sum(axis=0)
    right, guessed, real = (int(count) for count in counts)
    precision, recall = right / max(guessed, 1), right / max(real, 1)
    return precision, recall, 2 * right / max(guessed + real, 1)


@lru_cache(1 << 16)  # a bootstrap measures rows many times
def _count_entities(predicted: bytes, truth: bytes, classes: tuple[str, ...]) -> tuple[int, int, int]:
    """Entities of a row that are right, predicted and real."""
    real = np.frombuffer(truth, np.int64)
    own = np.frombuffer(predicted, np.int64)[real >= 0]
    found, wanted = _entities(own.tolist(), classes), _entities(real[real >= 0].tolist(), classes)
    return len(found & wanted), len(found), len(wanted)


def _entities(tags: Sequence[int], classes: Sequence[str]) -> set[tuple[int, int, str]]:
    """First word, word behind the last and name of entities; an I- behind another name begins one."""
    found: set[tuple[int, int, str]] = set()
    start, name, has_ended = 0, "", False
    for place, tag in enumerate([*(classes[tag] for tag in tags), _OUTSIDE]):
        if name and (has_ended or tag == _OUTSIDE or tag.startswith(_FIRST) or tag[2:] != name):
            found.add((start, place, name))
            name = ""
        if tag != _OUTSIDE and not name:
            start, name = place, tag[2:]
        has_ended = tag.startswith(_LAST)
    return found


class TaggedRows(TextRows):
    """The words and tags of a table by split; no other column is read."""

    text_options = ()
    unclassed = "Rows of many tags have no class to cut by."
    defaults: Mapping[str, Any] = {
        **TEXTS,  # a row of more tokens than max_length becomes several sequences
        "words": "words",  # column with the lists of words
        "label": "tags",  # column with the lists of tags
    }

    @override
    def _readers(self) -> dict[str, Reader]:
        return dict.fromkeys((self.options["words"], self.options["label"]), read_texts)

    @override
    def _features(self) -> list[str]:
        super()._features()
        words = self.table.require(self.options["words"], field=f"{FIELD}.words")
        for name, remedy in ((words, "Remove the row."), (self.label, "Give every word a tag, or remove the row.")):
            self.table.refuse_gaps(name, remedy)
        for place, texts, tags in zip(self.table.places, *self.columns(), strict=True):
            if not texts:
                what = f"{place}, column '{words}': the list of words is empty."
                raise DataError(what, field=SOURCES, remedy="Remove the row.")
            if len(texts) != len(tags):
                what = f"{place}: there are {len(texts)} words and {len(tags)} tags."
                raise DataError(what, field=SOURCES, remedy="Give each word one tag.")
        return []

    def columns(self) -> tuple[list[list[str]], list[list[str]]]:
        """The words and the tags of the rows; blanks at the ends of tags do not count."""
        tags = [list(map(str.strip, row)) for row in self.table.columns[self.label]]
        return list(self.table.columns[self.options["words"]]), tags

    @override
    def classes(self) -> list[str]:
        words, tags = self.columns()
        known = sorted({tag for row in self.splits["train"].tolist() for tag in tags[row]})
        if len(known) < 2:
            what = f"All words of the training rows have the tag '{known[0]}', so there is nothing to learn."
            raise DataError(what, field=f"{FIELD}.label", value=self.label, remedy="Give rows with two tags or more.")
        for split, chosen in self.splits.items():
            for row in chosen.tolist():
                new = next((number for number, tag in enumerate(tags[row]) if tag not in known), None)
                if new is not None:
                    what = f"{self.table.places[row]}: the tag '{tags[row][new]}' of word {new} ('{words[row][new]}')"
                    what += f" in the split '{split}' is in no row of train."
                    remedy = "Give more rows with it, correct it, or cut the rows in another way."
                    raise DataError(what, field=f"{FIELD}.split", remedy=remedy)
        self._check_names(known)
        return known

    def _check_names(self, known: Sequence[str]) -> None:
        """Raise DataError for the mark of a token without a tag, and warn of tags that are no entity's among others."""
        if str(NO_TARGET) in known:
            what = f"The tag {NO_TARGET} marks tokens that do not count, and would be learned like any tag."
            remedy = "Give whole words and a tag for every word."
            raise DataError(what, field=f"{FIELD}.label", value=self.label, remedy=remedy)
        self._warn_of_cases(self.label, known)
        if all(map(str.isdecimal, known)):
            what = f"The tags of '{self.label}' are numbers, and entities are known by names such as B-PER"
            self._warnings.append(f"{what}: entities are not measured.")
        odd = _without_entity(known)
        if odd and len(odd) + (_OUTSIDE in known) < len(known):
            what = f"The tag '{odd[0]}' is none of an entity (B-NAME, I-NAME, O), as others of '{self.label}' are"
            self._warnings.append(f"{what}: entities are not measured.")


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read words and tags, and find a tokenizer for them.

    Returns:
        For every split its rows: the words by the name of their column, and the words' tags in `labels` (0 on),
        and in `usual_tags` the tag that it had most often in training; `row_id`.
    """
    table = TaggedRows(options, out)
    classes, chosen = table.classes(), table.options
    words, tags = table.columns()
    number = {name: index for index, name in enumerate(classes)}
    labels = [[number[tag] for tag in row] for row in tags]
    train = table.splits["train"].tolist()
    find_tokenizer(chosen, (" ".join(words[row]) for row in train), out, of_words=True)
    out.info.update(
        label=table.label,
        classes=classes,
        words=chosen["words"],
        max_length=chosen["max_length"],
        **note_form({chosen["words"]: "words"}, chosen),
    )
    usual, most = find_usual(pair for row in train for pair in zip(words[row], labels[row], strict=True))
    expected = [[usual.get(word, most) for word in row] for row in words]
    return table.rows(labels, {chosen["words"]: words, _USUAL: expected})


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model by name, from a folder, or at random from a configuration; with adapters on request.

    Args:
        options: the settings of `model_places.MODEL`, and `new_head`: replace a head that was trained for other tags.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of tags.
    """
    return build_classifier(options, data, head="ForTokenClassification", task="TOKEN_CLS")


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch of sequences: `input_ids`, `attention_mask` and labels ``[sequences, tokens]``.

    Beside them, and not for the model, `places` ``[rows, words]``: where the first tokens of words are among the
    tokens of all sequences, -1 where a row has no word; and the usual tags ``[rows, words]``.
    """
    words = [list(row[data.info["words"]]) for row in rows]
    encoded, places = _encode(words, data)
    if unwritten := [
        (row, word) for row, starts in enumerate(places) for word, place in enumerate(starts) if place < 0
    ]:
        for row, word in unwritten:  # nothing is left of it by the tokenizer's normalization
            words[row][word] = kept_tokenizer(data).unk_token or "?"
        encoded, places = _encode(words, data)
    batch = {"places": pad_rows(places, -1), **encoded}
    if "labels" in rows[0]:
        batch[_USUAL] = pad_rows([row[_USUAL] for row in rows], NO_TARGET)
        tags = pad_rows([row["labels"] for row in rows], NO_TARGET)
        labels = torch.full_like(encoded["input_ids"], NO_TARGET)
        present = batch["places"] >= 0
        labels.view(-1)[batch["places"][present]] = tags[present]
        batch["labels"] = labels
    return batch


def _encode(words: Sequence[Sequence[str]], data: DataInfo) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The tensors of a batch, and the places of first tokens by row and word; -1 for a word without tokens."""
    encoded = kept_tokenizer(data)(
        words,
        is_split_into_words=True,
        padding=True,
        truncation=True,
        max_length=data.info["max_length"],
        return_overflowing_tokens=True,
        return_tensors="pt",
    )
    places = [[-1] * len(row) for row in words]
    length = encoded["input_ids"].shape[1]
    for sequence, row in enumerate(encoded["overflow_to_sample_mapping"].tolist()):
        for token, word in enumerate(encoded.word_ids(sequence)):
            if word is not None and places[row][word] < 0:
                places[row][word] = sequence * length + token
    return {name: value for name, value in encoded.items() if name != "overflow_to_sample_mapping"}, places


class Trainer(RowTrainer):
    """A Trainer that measures words, not tokens."""

    kept = ("places", _USUAL)

    @override
    def predict_rows(self, outputs: Any, labels: Any, kept: Mapping[str, Tensor]) -> tuple[Any, Any]:
        places = kept["places"]
        first, missing = places.clamp(min=0), places < 0
        best = outputs.flatten(0, 1)[first].float().softmax(dim=-1).max(dim=-1)
        tags = best.indices.masked_fill(missing, NO_TARGET), best.values.masked_fill(missing, NO_TARGET)
        if labels is None:
            return tags, None
        return tags, (labels.flatten()[first].masked_fill(missing, NO_TARGET), kept[_USUAL])


def compute_metrics(evaluation: EvalPrediction, data: DataInfo) -> dict[str, float]:
    """Measure accuracy and macro F1 over words, and F1 of entities, next to the words' usual tags in training.

    Tags are numbers ``[rows, words]``, negative where a row has no word. `accuracy_over_usual` and
    `entity_f1_over_usual` are what the model is better by. Tags that neither occur nor are predicted do not count in
    the macro F1.
    """
    (predicted, _), (truth, usual), classes = evaluation.predictions, evaluation.label_ids, tuple(data.info["classes"])
    words = truth >= 0
    right, own, expected = (predicted == truth)[words], predicted[words], truth[words]
    both = np.bincount(own, minlength=len(classes)) + np.bincount(expected, minlength=len(classes))
    hits = np.bincount(expected[right], minlength=len(classes))
    accuracy, of_usual = float(right.mean()), float((usual == truth)[words].mean())
    found = {
        "accuracy": accuracy,
        "macro_f1": float((2 * hits[both > 0] / both[both > 0]).mean()),
        "usual_accuracy": of_usual,
        "accuracy_over_usual": accuracy - of_usual,
        "words": float(words.sum()),
    }
    if _OUTSIDE not in classes or _without_entity(classes):
        return found
    precision, recall, f1 = _score_entities(predicted, truth, classes)
    usual_f1 = _score_entities(usual, truth, classes)[2]
    return {
        **found,
        "entity_precision": precision,
        "entity_recall": recall,
        "entity_f1": f1,
        "usual_entity_f1": usual_f1,
        "entity_f1_over_usual": f1 - usual_f1,
    }


def outcome_pairs(evaluation: EvalPrediction) -> dict[str, np.ndarray]:
    """Pair the tags of words with the right ones."""
    (tags, confidence), (labels, _) = evaluation.predictions, evaluation.label_ids
    words = labels >= 0
    found = {"predictions": tags, "confidence": confidence, "labels": labels}
    return {"rows": np.nonzero(words)[0], **{name: values[words] for name, values in found.items()}}


def prediction_columns(predictions: Sequence[np.ndarray], data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn tags and their probabilities ``[rows, words]`` into lists with names and numbers of the words."""
    tags, confidence = predictions
    classes = data.info["classes"]
    return {
        "prediction": [[classes[tag] for tag in row if tag >= 0] for row in tags.tolist()],
        "confidence": [sure[row >= 0].astype(np.float32).tolist() for row, sure in zip(tags, confidence, strict=True)],
    }
