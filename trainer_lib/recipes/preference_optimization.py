"""The recipe preference-optimization: of two answers to a prompt a model learns to prefer one (DPO), whole or by LoRA.

    name: polite
    recipe: preference-optimization
    prepare:
      sources: [pairs.jsonl]  # {"prompt": …, "chosen": …, "rejected": …}
      options: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, max_length: 512}
    train:
      model: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, lora: {r: 8}, beta: 0.1}
      args: {num_train_epochs: 1, learning_rate: 5.0e-6, global_batch_size: 16}
    evaluate: {splits: [validation, test]}

Direct Preference Optimization (Rafailov et al., 2023) raises the probability of the chosen answer over that of the
rejected one, each compared to that by the reference: the model that training begins with. What the reference says
prepare computes once and keeps with the rows: training holds one model, and a run that goes on has the same numbers.

Without `pretrained` or `folder` a byte-level vocabulary is learned from the training texts, and the weights begin at
random by `prepare.options.config` and `seed`.

To replace a function, import the others into a file of your own, and define yours behind them::

    from trainer_lib.recipes.preference_optimization import *
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.model_places import (
    DTYPES,
    ENDS,
    add_adapters,
    load_causal_model,
    new_causal_model,
    one_of,
    require_positions,
)
from trainer_lib.recipes.option_names import PathOptions, choose, require_choice
from trainer_lib.recipes.packed_batches import batch_prompts, continue_prompts
from trainer_lib.recipes.table_cells import read_exact_text
from trainer_lib.recipes.table_files import SOURCES, Reader, note_form
from trainer_lib.recipes.tabular_rows import FIELD, TEXTS, TextRows
from trainer_lib.recipes.tokenizing import find_tokenizer, kept_tokenizer
from trainer_lib.trainer import Trainer as PlainTrainer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

NAMES = ["chosen", "rejected"]
_TEXTS = ("prompt", "chosen", "rejected")


class Answer(NamedTuple):
    """A prompt with an answer, as tokens; the answer begins at `start`."""

    tokens: list[int]
    start: int


class PreferredPairs(TextRows):
    """The rows of a table by split: a prompt, the answer that is preferred, and the other one."""

    text_options = _TEXTS
    label_option = "chosen"
    reserved = ("labels", "row_id", "reference_chosen", "reference_rejected")
    defaults: Mapping[str, Any] = {
        **TEXTS,
        "prompt": "prompt",  # column with the prompts
        "chosen": "chosen",  # column with the answers that are preferred; they follow the prompt at once
        "rejected": "rejected",  # column with the other answers
        "max_length": 512,  # tokens of a prompt with an answer; longer answers are cut
        "config": {},  # configuration of a model that begins at random
        "seed": 0,  # by which its weights are drawn
        "dtype": "float32",  # type of a loaded model's weights
    }

    @override
    def _readers(self) -> Mapping[str, Reader]:
        # As they are: spaces at their ends are tokens, too.
        return {self.options[name]: read_exact_text for name in _TEXTS}

    def answers(self, tokenizer: Any) -> tuple[list[Answer], list[Answer], int]:
        """The chosen and the rejected answer of each row, and how many of them are cut.

        Raises:
            DataError: the answers of a row are alike, or its prompt leaves no room for them.
        """
        names = [self.options[name] for name in _TEXTS]
        prompts, chosen, rejected = (self.table.columns[name] for name in names)
        longest = self.options["max_length"]
        for place, one, other in zip(self.table.places, chosen, rejected, strict=True):
            if one.strip() == other.strip():
                what = f"{place}, columns '{names[1]}' and '{names[2]}': the two answers are alike, so none is better"
                raise DataError(f"{what}: '{one[:40]}'.", field=SOURCES, remedy="Remove the row.")
        tokens = prompt_tokens(prompts, tokenizer)
        for place, each in zip(self.table.places, tokens, strict=True):
            if len(each) >= longest:
                what = f"{place}, column '{names[0]}': the prompt has {len(each):,} tokens of at most {longest:,}"
                what += ", which leaves no room for an answer."
                remedy = "Shorten the prompt, or set a greater max_length, as far as the model reads it."
                raise DataError(what, field=f"{FIELD}.max_length", value=longest, remedy=remedy)
        found = [answer_tokens(tokens, answers, tokenizer, longest=longest) for answers in (chosen, rejected)]
        for place, one, other in zip(self.table.places, *(answers for answers, _ in found), strict=True):
            if one.tokens == other.tokens:
                what = f"{place}: the first {longest:,} tokens of prompt and answer are the same for both answers"
                remedy = "Remove the row, or set a greater max_length, as far as the model reads it."
                what += ", and the rest is cut."
                raise DataError(what, field=f"{FIELD}.max_length", value=longest, remedy=remedy)
        return found[0][0], found[1][0], found[0][1] + found[1][1]


def prompt_tokens(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The tokens of prompts, as the tokenizer makes them of a text that goes on."""
    if not prompts:
        return []
    end = tokenizer.eos_token_id
    made = tokenizer(list(prompts), verbose=False)["input_ids"]
    return [tokens[:-1] if end is not None and len(tokens) > 1 and tokens[-1] == end else tokens for tokens in made]


def answer_tokens(
    prompts: Sequence[list[int]], answers: Sequence[str], tokenizer: Any, *, longest: int
) -> tuple[list[Answer], int]:
    """Prompts and their answers, each with the token for the end, of at most `longest` tokens; how many are cut."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    made = tokenizer(list(answers), add_special_tokens=False, verbose=False)["input_ids"]
    whole = [[*prompt, *tokens, *end] for prompt, tokens in zip(prompts, made, strict=True)]
    found = [Answer(tokens[:longest], len(prompt)) for prompt, tokens in zip(prompts, whole, strict=True)]
    return found, sum(len(tokens) > longest for tokens in whole)


def batch_answers(answers: Sequence[Answer], *, pad: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `is_answer` ``[answers, tokens]``, filled up at the end."""
    size = (len(answers), max(len(each.tokens) for each in answers))
    batch = {"input_ids": torch.full(size, pad), "attention_mask": torch.zeros(size, dtype=torch.long)}
    batch["is_answer"] = torch.zeros(size, dtype=torch.bool)
    for row, (tokens, start) in enumerate(answers):
        batch["input_ids"][row, : len(tokens)] = torch.tensor(tokens)
        batch["attention_mask"][row, : len(tokens)] = 1
        batch["is_answer"][row, start : len(tokens)] = True
    return batch


def score_answers(model: Any, answers: Sequence[Answer], *, pad: int, together: int = 16) -> np.ndarray:
    """The logarithm of each answer's probability by a model, float64 ``[answers]``; on a GPU where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device).eval()
    order = sorted(range(len(answers)), key=lambda row: -len(answers[row].tokens))  # little padding
    found = np.empty(len(answers))
    with torch.no_grad():
        for start in range(0, len(order), together):
            rows = order[start : start + together]
            made = batch_answers([answers[row] for row in rows], pad=pad)
            batch = {name: tensor.to(device) for name, tensor in made.items()}
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
            found[rows] = log_probabilities(logits, batch["input_ids"], batch["is_answer"]).double().cpu().numpy()
    return found


class FirstModel:
    """A function that builds the model that training begins with; always the same model.

    Args:
        info: what prepare noted: the model's `config`, `seed`, `max_length` and `dtype`, and the tokenizer's
            `vocabulary` and `ends`.
        place: its name or its folder; None for weights at random.
    """

    def __init__(self, info: Mapping[str, Any], place: str | None) -> None:
        self._info = {name: info[name] for name in ("config", "seed", "max_length", "dtype", "vocabulary", "ends")}
        self._place = place
        self._built: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}

    @property
    def pad(self) -> int:
        """The token that fills up short texts."""
        return int(self._info["ends"]["pad_token_id"])

    def build(self, *, field: str) -> Any:
        """The model, on the CPU; the generators of random numbers stay as they are. Raises as `load_causal_model`."""
        info = self._info
        if self._place is not None:
            return load_causal_model(self._place, dtype=info["dtype"], vocabulary=info["vocabulary"], field=field)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(info["seed"])
            facts = {"length": info["max_length"], "vocabulary": info["vocabulary"], "ends": info["ends"]}
            return new_causal_model(info["config"], **facts, field="prepare.options")

    def once(self, device: torch.device) -> Any:
        """The model in evaluation mode, built at the first call."""
        if self._built is None:
            self._built = self.build(field="train.model").to(device).eval()
        return self._built


# -- losses and metrics -----------------------------------------------------------------------------------------------
# With ``r = log p(y|x) - log p_ref(y|x)``, the logarithm of an answer's probability given its prompt over that of the
# reference, beta r is the answer's implicit reward (Rafailov et al., Direct Preference Optimization, 2023, equation 5
# up to a term of the prompt, which cancels), and the loss is ``-log sigmoid(beta (r_chosen - r_rejected))`` (7).
LOSSES = ("sigmoid", "ipo")


def log_probabilities(logits: Tensor, tokens: Tensor, is_answer: Tensor) -> Tensor:
    """The logarithm of each answer's probability ``[texts]``: the sum over its tokens, given all before them.

    Of logits ``[texts, tokens, vocabulary]`` and tokens ``[texts, tokens]``; `is_answer` is never true at the first.
    """
    scores = logits[:, :-1].transpose(1, 2).float()
    nats = nn.functional.cross_entropy(scores, tokens[:, 1:], reduction="none")
    return -(nats * is_answer[:, 1:]).sum(dim=1)


def preference_losses(ratios: Tensor, *, beta: float, loss: str = "sigmoid", label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair ``[pairs]``.

    Args:
        ratios: ``[pairs, 2]``, of the chosen and of the rejected answer: the logarithm of its probability less that
            by the reference.
        beta: how much a distance from the reference counts.
        loss: `sigmoid` (Rafailov et al., 2023, equation 7), or `ipo`, the square of the distance to 1 / (2 beta) (Azar
            et al., A General Theoretical Paradigm to Understand Learning from Human Preferences, 2023, equation 17).
        label_smoothing: the share of pairs that are thought to be the wrong way round (`sigmoid` alone).
    """
    margins = ratios[:, 0] - ratios[:, 1]
    if loss == "ipo":
        return (margins - 1 / (2 * beta)) ** 2
    log_sigmoid = nn.functional.logsigmoid
    right, wrong = log_sigmoid(beta * margins), log_sigmoid(-beta * margins)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def with_lengths(reference: Tensor, is_answer: Tensor) -> Tensor:
    """The facts of each pair without the model ``[pairs, 4]``: log-probabilities by the reference, and lengths.

    Of the reference ``[pairs, 2]``, and `is_answer` ``[2 pairs, tokens]``, the chosen answers first.
    """
    return torch.cat((reference.double(), torch.stack(is_answer.sum(dim=1).chunk(2), dim=1).double()), dim=1)


def measure_preferences(rewards: np.ndarray, known: np.ndarray, whole: np.ndarray | None = None) -> dict[str, float]:
    """The share of chosen answers with the higher reward, next to two baselines without training.

    These are the reference, which prefers what it thinks is more probable, and the lengths of answers: always the
    longer one, or always the shorter one, whichever is right more often for these very rows. A tie is half right.

    Args:
        rewards: ``[rows, 2]``, of the chosen and of the rejected answer.
        known: ``[rows, 4]``, as `with_lengths` makes it.
        whole: where these rows are a resample, what is known of all rows: it says whether the longer one counts.
    """
    margins, others = rewards[:, 0] - rewards[:, 1], np.asarray(known, np.float64)
    every = others if whole is None else np.asarray(whole, np.float64)
    accuracy, reference, longer = (
        _share_right(each) for each in (margins, others[:, 0] - others[:, 1], others[:, 2] - others[:, 3])
    )
    length = longer if _share_right(every[:, 2] - every[:, 3]) >= 0.5 else 1 - longer
    return {
        "accuracy": accuracy,
        "reward_margin": float(margins.mean()),
        "chosen_reward": float(rewards[:, 0].mean()),
        "rejected_reward": float(rewards[:, 1].mean()),
        "reference_accuracy": reference,
        "length_accuracy": length,
        "accuracy_over_reference": accuracy - reference,
        "accuracy_over_length": accuracy - length,
    }


def _share_right(margins: Any) -> float:
    return float(((margins > 0) + 0.5 * (margins == 0)).mean())


# -- the recipe -------------------------------------------------------------------------------------------------------
def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the pairs, find a tokenizer for them, and ask the reference for the probabilities of their answers.

    Returns:
        For every split its rows: the three texts by the names of their columns; `reference_chosen` and
        `reference_rejected`, the logarithms of the answers' probabilities; in `labels` 0, the place of the chosen
        answer; `row_id`.
    """
    table = PreferredPairs(options, out)
    chosen = table.options
    require_choice(chosen["dtype"], DTYPES, field=f"{FIELD}.dtype")
    place = one_of(chosen, field=FIELD)
    texts = {name: table.texts_of(name) for name in _TEXTS}
    if place is not None:
        require_positions(place, chosen["max_length"], field=f"{FIELD}.max_length")
    train = (texts[name][row] for row in table.splits["train"].tolist() for name in texts)
    tokenizer = find_tokenizer(chosen, train, out, of_bytes=True)
    preferred, others, num_cut = table.answers(tokenizer)
    out.info.update(
        {name: chosen[name] for name in ("prompt", "chosen", "rejected", "max_length", "config", "seed", "dtype")},
        new_columns={chosen[name]: "string" for name in texts},
        reference=chosen["pretrained"],
        has_place=place is not None,
        classes=NAMES,
        cut_answers=num_cut,
        ends={name: getattr(tokenizer, name) for name in ENDS},
        **note_form({chosen["prompt"]: "exact"}, chosen, optional=[chosen["chosen"], chosen["rejected"]]),
    )
    model = FirstModel(out.info, place).build(field=FIELD)
    scores = score_answers(model, [*preferred, *others], pad=tokenizer.pad_token_id)
    if not np.isfinite(scores).all():
        row = int(np.flatnonzero(~np.isfinite(scores))[0]) % len(table.table)
        what = f"{table.table.places[row]}: the reference gives this row no finite probability."
        raise DataError(what, field=FIELD, value=place, remedy="Set prepare.options.dtype=float32.")
    one, other = scores.reshape(2, -1)
    return table.rows(
        [0] * len(table.table),
        {
            **{chosen[name]: each for name, each in texts.items()},
            "reference_chosen": one.tolist(),
            "reference_rejected": other.tolist(),
        },
    )


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model that the reference is, with adapters if `lora` is given.

    Raises:
        ConfigError: transformers cannot load it, it is not that of prepare, or a setting has no sense.
    """
    defaults: dict[str, Any] = {
        "pretrained": None,
        "folder": None,
        "config": None,  # belongs to prepare
        "lora": {},  # train adapters of this form in place of all weights
        "beta": 0.1,  # how much a distance from the reference counts
        "loss": "sigmoid",  # of DPO, or ipo
        "label_smoothing": 0.0,  # share of pairs that are thought to be the wrong way round
        "new_tokens": 64,  # the most tokens of an answer that is generated for a new prompt
    }
    chosen = choose(options, defaults, field="train.model")
    require_choice(chosen["loss"], LOSSES, field="train.model.loss")
    _require_between("beta", chosen["beta"], most=float("inf"), is_open=True)
    _require_between("label_smoothing", chosen["label_smoothing"], most=0.5, is_open=False)
    place = one_of(chosen, field="train.model")
    _require_reference(chosen, place, data)
    first = FirstModel(data.info, place)
    model = first.build(field="train.model")
    model.config.use_cache = False  # training has no use for it
    remedy = "Give pretrained or folder in prepare.options and in train.model."
    model = add_adapters(model, chosen["lora"], place=place, remedy=remedy)
    model.preference = {name: chosen[name] for name in ("beta", "loss", "label_smoothing")}
    model.first, model.new_tokens = first, chosen["new_tokens"]
    built: nn.Module = model
    return built


def _require_reference(chosen: Mapping[str, Any], place: str | None, data: DataInfo) -> None:
    if chosen["config"] is not None:
        what = "Training begins with the reference, so its configuration belongs to prepare."
        remedy = "Move it to prepare.options.config."
        raise ConfigError(what, field="train.model.config", value=chosen["config"], remedy=remedy)
    if (place is not None) != data.info["has_place"] or chosen["pretrained"] != data.info["reference"]:
        reference = data.info["reference"] or ("from a folder" if data.info["has_place"] else "one at random")
        what = f"Training begins with the reference, and in prepare that is {reference}."
        remedy = "Name one model in train.model and in prepare.options."
        raise ConfigError(what, field="train.model", value=place, remedy=remedy)


def _require_between(name: str, value: float, *, most: float, is_open: bool) -> None:
    if value < 0 or value >= most or (is_open and value == 0):
        what = "The loss has no sense with this number."
        remedy = "Give a number above 0, such as 0.1." if is_open else f"Give a number from 0 on and below {most}."
        raise ConfigError(what, field=f"train.model.{name}", value=value, remedy=remedy)


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch: `lengths` of answers and `reference` ``[rows, 2]``, `labels` ``[rows]``, and answers.

    These are `input_ids`, `attention_mask` and `is_answer` ``[2 rows, tokens]``, the chosen ones first. New rows have
    no labels and no reference; where they have prompts alone, there are `input_ids` and `attention_mask`
    ``[rows, tokens]``, filled up at the beginning.

    Raises:
        DataError: the prompt of a new row leaves no room for an answer.
    """
    info, tokenizer = data.info, kept_tokenizer(data)
    prompts = prompt_tokens([row[info["prompt"]] for row in rows], tokenizer)
    longest, pad = info["max_length"], tokenizer.pad_token_id
    for row, tokens in zip(rows, prompts, strict=True):
        if len(tokens) >= longest:
            text = row[info["prompt"]][:40]
            what = f"the prompt '{text}' has {len(tokens):,} tokens, and with its answer at most {longest:,} are read."
            raise DataError(what, field="rows", value=info["prompt"], remedy="Shorten the prompt.")
    if info["chosen"] not in rows[0] and info["rejected"] not in rows[0]:
        ids, mask = batch_prompts(prompts, pad=pad)
        return {"input_ids": ids, "attention_mask": mask}
    answers = [
        answer
        for name in NAMES
        for answer in answer_tokens(prompts, [row[info[name]] for row in rows], tokenizer, longest=longest)[0]
    ]
    batch = batch_answers(answers, pad=pad)
    lengths = torch.stack(batch["is_answer"].sum(dim=1).chunk(2), dim=1)
    if "labels" not in rows[0]:
        return {"lengths": lengths, **batch}
    reference = [[row[f"reference_{name}"] for name in NAMES] for row in rows]
    labels = torch.tensor([row["labels"] for row in rows])
    return {"lengths": lengths, "labels": labels, "reference": torch.tensor(reference), **batch}


class Trainer(PlainTrainer):
    """A Trainer that compares the answers of a pair, and generates one for a prompt that has none."""

    @override
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        if self.state.global_step == 0:  # the weights are still those that training begins with
            self._require_reference()
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _require_reference(self) -> None:
        """Raise ConfigError where the model says something else of the first row than the reference did."""
        if any(each.is_meta for each in self.model.parameters()):
            return  # without values there is nothing to compare
        rows: Any = self.train_dataset
        device = next(self.model.parameters()).device
        inputs = {name: each.to(device) for name, each in self.data_collator([rows[0]]).items()}
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                own, reference = self._log_probabilities(self.model, inputs), inputs["reference"]
        finally:
            self.model.train(was_training)
        is_rough = self.args.bf16 or self.args.fp16 or own.dtype != next(self.model.parameters()).dtype
        share, nats = (1e-2, 0.5) if is_rough else (1e-3, 1e-2)
        if bool(((own - reference).abs() > nats + share * reference.abs()).any()):
            what = f"The model gives the first row's answers the log-probabilities {_shown(own)}, and the reference"
            remedy = "Name one model in train.model and in prepare.options; if it was changed, --force prepare."
            what += f" gave them {_shown(reference)}: it is another model."
            raise ConfigError(what, field="train.model", remedy=remedy)

    @override
    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        ratios = self._log_probabilities(model, inputs) - inputs["reference"]
        losses = self._losses(ratios)
        loss = losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch
        return (loss, {"loss": loss, "rewards": self._beta * ratios}) if return_outputs else loss

    @override
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            if "lengths" not in inputs:
                return None, self._generate(inputs), None
            own = self._log_probabilities(model, inputs)
            if "labels" not in inputs:
                return None, self._beta * (own - self._ask_reference(inputs)), None
            ratios = own - inputs["reference"]
            loss = self._losses(ratios).mean()
        if prediction_loss_only:
            return loss, None, None
        known = with_lengths(inputs["reference"], inputs["is_answer"])
        return loss, self._beta * ratios, (inputs["labels"], known)

    @property
    def _beta(self) -> float:
        built: Any = self.model
        return float(built.preference["beta"])

    def _losses(self, ratios: Tensor) -> Tensor:
        built: Any = self.model
        return preference_losses(ratios, **built.preference)

    def _log_probabilities(self, model: nn.Module, inputs: Any) -> Tensor:
        """The logarithms of the answers' probabilities ``[rows, 2]``."""
        with self.autocast_smart_context_manager():
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])["logits"]
        found = log_probabilities(logits, inputs["input_ids"], inputs["is_answer"])
        return torch.stack(found.chunk(2), dim=1)

    def _ask_reference(self, inputs: Any) -> Tensor:
        """Log-probabilities ``[rows, 2]`` of new rows by the reference: the model without adapters, or as it began."""
        built: Any = self.model
        if hasattr(built, "disable_adapter"):
            with built.disable_adapter():
                return self._log_probabilities(built, inputs)
        return self._log_probabilities(built.first.once(inputs["input_ids"].device), inputs)

    def _generate(self, inputs: Any) -> Tensor:
        """New tokens ``[rows, tokens]``, the most likely one each time."""
        built: Any = self.model
        ids = inputs["input_ids"]
        wanted = torch.full((len(ids),), built.new_tokens, device=ids.device)
        with self.autocast_smart_context_manager():
            return continue_prompts(built, ids, inputs["attention_mask"], wanted, pad=built.first.pad)


def _shown(values: Tensor) -> str:
    return " and ".join(f"{value:.1f}" for value in values.flatten().tolist())


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure rewards ``[rows, 2]``, beside what the reference and the lengths of answers tell."""
    return measure_preferences(np.asarray(evaluation.predictions), evaluation.label_ids[1], evaluation.whole_labels[1])


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn rewards ``[rows, 2]`` into the answer that is preferred and how surely, or tokens into a new answer."""
    if predictions.dtype.kind in "iu":
        plain = [row[row >= 0].tolist() for row in predictions]
        return {"prediction": kept_tokenizer(data).batch_decode(plain, skip_special_tokens=True)}
    margins = predictions[:, 0].astype(np.float64) - predictions[:, 1]
    return {
        "prediction": [NAMES[int(margin < 0)] for margin in margins.tolist()],
        "probability": 1 / (1 + np.exp(-np.abs(margins))),
        "margin": margins,
        "chosen_reward": predictions[:, 0].astype(np.float64),
        "rejected_reward": predictions[:, 1].astype(np.float64),
    }
