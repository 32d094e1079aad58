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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.outputs import EvalPrediction
from trainer_lib.recipes.causal_models import DTYPES, ENDS, require_positions
from trainer_lib.recipes.lora_adapters import add_adapters
from trainer_lib.recipes.model_places import one_of
from trainer_lib.recipes.option_names import choose, require_choice
from trainer_lib.recipes.preference_reference import FirstModel
from trainer_lib.recipes.preference_scores import (
    LOSSES,
    log_probabilities,
    measure_preferences,
    preference_losses,
    with_lengths,
)
from trainer_lib.recipes.preferred_pairs import (
    PreferredPairs,
    answer_tokens,
    batch_answers,
    prompt_tokens,
    score_answers,
)
from trainer_lib.recipes.raw_texts import batch_prompts, continue_prompts
from trainer_lib.recipes.table_form import note_form
from trainer_lib.recipes.tabular_rows import FIELD
from trainer_lib.recipes.tokenizing import (
    keep_tokenizer,
    kept_tokenizer,
    learn_byte_tokenizer,
    load_tokenizer,
)
from trainer_lib.trainer import Trainer as PlainTrainer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

MODEL: dict[str, Any] = {
    "pretrained": None,
    "folder": None,
    "config": None,
    "lora": {},
    "beta": 0.1,
    "loss": "sigmoid",
    "label_smoothing": 0.0,
    "new_tokens": 64,
}
"""The settings of `build_model` (`train.model`), with their defaults."""
NAMES = ["chosen", "rejected"]


class Options(TypedDict):
    """The options of `prepare`; `rename`, `id`, `files` and `split` are as of a table."""

    prompt: NotRequired[str]
    """Column with the prompts."""
    chosen: NotRequired[str]
    """Column with the answers that are preferred; they follow the prompt at once."""
    rejected: NotRequired[str]
    """Column with the other answers."""
    pretrained: NotRequired[str]
    """Name on the Hub of the model that training begins with."""
    folder: NotRequired[Path]
    """Folder of the model that training begins with."""
    config: NotRequired[dict[str, Any]]
    """Configuration of a model that begins at random."""
    seed: NotRequired[int]
    """What the weights at random are drawn by."""
    dtype: NotRequired[str]
    """Type of a loaded model's weights."""
    files: NotRequired[dict[str, Path]]
    """Split -> its file."""
    pad_token: NotRequired[str]
    """Token that fills up short texts, for a tokenizer that has none."""
    vocabulary: NotRequired[int]
    """Tokens of a vocabulary that is learned."""
    max_length: NotRequired[int]
    """Tokens of a prompt with an answer; longer answers are cut."""


class ModelOptions(TypedDict):
    """The settings of `build_model`."""

    pretrained: NotRequired[str]
    folder: NotRequired[Path]
    lora: NotRequired[dict[str, Any]]
    """Train adapters of this form in place of all weights."""
    beta: NotRequired[float]
    """How much a distance from the reference counts."""
    loss: NotRequired[str]
    """sigmoid (DPO) or ipo."""
    label_smoothing: NotRequired[float]
    """Share of pairs that are thought to be the wrong way round."""
    new_tokens: NotRequired[int]
    """Tokens of an answer that is generated for a new prompt, at most."""


def prepare(options: Options, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the pairs, find a tokenizer for them, and ask the reference for the probabilities of their answers.

    Returns:
        For every split its rows: the three texts by the names of their columns; `reference_chosen` and
        `reference_rejected`, the logarithms of the answers' probabilities; in `labels` 0, the place of the chosen
        answer; `row_id`.
    """
    table = PreferredPairs(options, out, classes=False)
    chosen = table.options
    require_choice(chosen["dtype"], DTYPES, field=f"{FIELD}.dtype")
    place = one_of(chosen, field=FIELD)
    texts = {name: table.table.texts(chosen[name]) for name in ("prompt", "chosen", "rejected")}
    if place is None:
        train = (texts[name][row] for row in table.splits["train"].tolist() for name in texts)
        tokenizer = learn_byte_tokenizer(train, vocabulary=chosen["vocabulary"])
    else:
        require_positions(place, chosen["max_length"], field=f"{FIELD}.max_length")
        tokenizer = load_tokenizer(place, pad_token=chosen["pad_token"], field=FIELD)
    preferred, others, num_cut = table.answers(tokenizer)
    out.info.update(
        {name: chosen[name] for name in ("prompt", "chosen", "rejected", "max_length", "config", "seed", "dtype")},
        new_columns={chosen[name]: "string" for name in texts},
        reference=chosen["pretrained"],
        has_place=place is not None,
        classes=NAMES,
        cut_answers=num_cut,
        vocabulary=len(tokenizer),
        ends={name: getattr(tokenizer, name) for name in ENDS},
        tokenizer=keep_tokenizer(tokenizer, out),
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


def build_model(options: ModelOptions, data: DataInfo) -> nn.Module:
    """Build the model that the reference is, with adapters if `lora` is given.

    Raises:
        ConfigError: transformers cannot load it, it is not that of prepare, or a setting has no sense.
    """
    chosen = choose(options, MODEL, field="train.model")
    require_choice(chosen["loss"], LOSSES, field="train.model.loss")
    _require_between("beta", chosen["beta"], most=float("inf"), is_open=True)
    _require_between("label_smoothing", chosen["label_smoothing"], most=0.5, is_open=False)
    place = one_of(chosen, field="train.model")
    _require_first(chosen, place, data)
    first = FirstModel(data.info, place)
    model = first.build(field="train.model")
    model.config.use_cache = False  # training has no use for it
    if chosen["lora"]:
        model = add_adapters(model, chosen["lora"])
    model.preference = {name: chosen[name] for name in ("beta", "loss", "label_smoothing")}
    model.first, model.new_tokens = first, chosen["new_tokens"]
    built: nn.Module = model
    return built


def _require_first(chosen: Mapping[str, Any], place: str | None, data: DataInfo) -> None:
    if chosen["config"] is not None:
        what = "Training begins with the reference, so its configuration belongs to prepare."
        remedy = "Move it to prepare.options.config."
        raise ConfigError(what, field="train.model.config", value=chosen["config"], remedy=remedy)
    if (place is not None) != data.info["has_place"] or chosen["pretrained"] != data.info["reference"]:
        reference = data.info["reference"] or ("from a folder" if data.info["has_place"] else "one at random")
        what = f"Training begins with the reference, and in prepare that is {reference}."
        remedy = "Name one model in train.model and in prepare.options."
        raise ConfigError(what, field="train.model", value=place, remedy=remedy)
    if chosen["lora"] and place is None:
        what = "Adapters are for a model that has been trained."
        remedy = "Give pretrained or folder in prepare.options and in train.model."
        raise ConfigError(what, field="train.model.lora", remedy=remedy)


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
            raise ConfigError(
                f"The model gives the first row's answers the log-probabilities {_shown(own)}, and the reference gave "
                f"them {_shown(reference)}: it is another model.",
                field="train.model",
                remedy="Name one model in train.model and in prepare.options; if it was changed, --force prepare.",
            )

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
        """What the reference says of new rows ``[rows, 2]``: the model without its adapters, or as it once began."""
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
