"""Prompts with answers that were judged: read as texts or as turns of a conversation, tokenized, and scored by a model.

What the reference says of answers, the model that training begins with, prepare computes once and keeps with the rows:
training holds one model, and a continued run has the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.recipes.shared import model_places
from trainer_lib.recipes.shared.recipe_options import TEXTS, require_choice
from trainer_lib.recipes.tables.cells import read_exact_text
from trainer_lib.recipes.tables.rows import FIELD, TextRows, raise_listed
from trainer_lib.recipes.tables.table_files import NOTE, SOURCES, Reader, note_form
from trainer_lib.recipes.texts import packed_batches
from trainer_lib.recipes.texts.conversations import parse_turns, read_conversation, role_of, split_prompts, turns_of
from trainer_lib.recipes.texts.packed_batches import preprocess_logits_for_metrics
from trainer_lib.recipes.texts.row_trainer import RowLossTrainer
from trainer_lib.recipes.texts.templates import ChatTemplate, FaultyError, find_template
from trainer_lib.recipes.texts.tokenizing import find_tokenizer, kept_tokenizer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

ANSWERED: dict[str, Any] = {
    **TEXTS,
    "prompt": "prompt",  # column with the prompts, which answers follow at once
    "template": None,  # of conversations, as of supervised-fine-tuning; with it texts are turns as well
    "system": None,  # the first turn of conversations that have no turn of the system
    "loss_on": "assistant",  # turns of the assistant behind the prompt, or the last of these
    "max_length": 512,  # tokens of a prompt with an answer; longer answers are cut
}
"""The options of rows with prompts and answers, with their defaults."""
REFERENCE: dict[str, Any] = {
    "config": {},  # configuration of a model that begins at random
    "seed": 0,  # by which its weights are drawn
    "dtype": "float32",  # type of a loaded model's weights
    "load_in": None,  # 4bit or 8bit: loaded weights take less memory
}
"""The options of the reference, with their defaults."""
POLICY: dict[str, Any] = {
    **model_places.MODEL,
    "config": None,  # belongs to prepare, as load_in does
    "beta": 0.1,  # how much a distance from the reference counts
    "new_tokens": 64,  # the most tokens of an answer that is generated for a new prompt
}
"""The settings of a model that begins as the reference, with their defaults."""
CONTEXT = ("tools", "system")
"""Columns that conversations may have besides prompts and answers, as rows of supervised-fine-tuning have them."""
_Scored = tuple[list[int], np.ndarray]  # tokens, and which of them are scored
_TOGETHER = 16  # answers that the reference scores at a time


# -- prepare ----------------------------------------------------------------------------------------------------------
class AnsweredPrompts(TextRows):
    """The rows of a table by split: a prompt, and answers to it."""

    answer_options: tuple[str, ...] = ()
    """The options that name the columns with answers."""
    needs_prompt = True

    @cached_property
    def _has_lists(self) -> dict[str, bool]:
        """Option -> whether its column holds lists, of columns that were read."""
        return {}

    @property
    def is_chat(self) -> bool:
        """Whether the rows are conversations."""
        return self.options["template"] is not None or any(self._has_lists.values())

    @override
    def _readers(self) -> dict[str, Reader]:
        turns = {self.options[name]: partial(self._read_turns, name) for name in ("prompt", *self.answer_options)}

        def read_context(value: Any, where: str) -> str | None:
            return json.dumps(value) if isinstance(value, list | tuple) else read_exact_text(value, where)

        return {**dict.fromkeys(CONTEXT, read_context), **turns}

    def _read_turns(self, name: str, value: Any, where: str) -> str | None:
        """A text as it is, whose spaces are tokens too; or a list of turns as JSON, where all of the column are."""
        value = [value] if isinstance(value, Mapping) else value
        is_list = isinstance(value, list | tuple)
        has_turns = is_list or (isinstance(value, str) and any(map(role_of, parse_turns(value) or ())))
        if value is not None and self._has_lists.setdefault(name, has_turns) != has_turns:
            what = "a list is not a text" if has_turns else "a text is not a list of turns"
            raise DataError(f"{where}: {what}, as the rows before have it.", field="rows")
        return (json.dumps(value) if value else None) if is_list else read_exact_text(value, where)

    @override
    def _features(self) -> list[str]:
        lacks = self.options["prompt"] not in self.table.columns
        if lacks and self.needs_prompt and not self.is_chat:
            remedy = f"Name their column: {FIELD}.prompt=NAME. Or give lists of turns, which begin with the prompt."
            raise DataError("The data has no prompts.", field=f"{FIELD}.prompt", remedy=remedy)
        self.text_options = self.answer_options if lacks else ("prompt", *self.answer_options)
        return super()._features()

    def read_texts(self) -> dict[str, list[str]]:
        """The prompts and the answers of all rows, by option; a prompt may be what the answers begin with."""
        columns = [self.texts_of(name) for name in self.text_options]
        columns = columns if "prompt" in self.text_options else [[""] * len(self.table), *columns]
        if self.is_chat:
            columns = split_prompts(*columns, places=self.table.places)
        return dict(zip(("prompt", *self.answer_options), columns, strict=True))

    @cached_property
    def context(self) -> dict[str, list[str]]:
        """The columns of `CONTEXT` that the table has, as texts ``[rows]``; of texts without turns none."""
        names = [name for name in CONTEXT if name in self.table.columns]
        if names and not self.is_chat:
            self._warn(names, "texts have no turns (prepare.options.template makes turns of them)")
        return {name: self.table.texts(name) for name in names} if self.is_chat else {}

    def tokenize(self, texts: Mapping[str, Sequence[str]], out: PrepareOutput) -> dict[str, list[dict[str, Any]]]:
        """Find a tokenizer for these texts, and make the tokens of answers, by option; note how they are made.

        Args:
            texts: as of `read_texts`, perhaps with more answers.

        Raises:
            DataError: a prompt leaves no room for an answer, or the template does not take a row. ConfigError: there
                is not such a model, or it does not read as many tokens.
        """
        chosen = self.options
        model_places.require_positions(chosen, "max_length", field=FIELD)
        require_choice(chosen["loss_on"], ("assistant", "last"), field=f"{FIELD}.loss_on")
        train = (texts[name][row] for row in self.splits["train"].tolist() for name in texts)
        if self.is_chat:
            turns = (turn for text in train for turn in turns_of(text, "user") if isinstance(turn, Mapping))
            tokenizer = find_template(chosen, (str(turn.get("content")) for turn in turns), out).tokenizer
        else:
            tokenizer = find_tokenizer(chosen, train, out, of_bytes=True)
        names = {name: chosen[name] for name in ("prompt", *self.answer_options)}
        known = [*names.values(), *(CONTEXT if self.is_chat else ())]
        needed = {chosen["prompt"]: "exact"} if "prompt" in self.text_options else {}
        out.info.update(
            {**names, **{name: chosen[name] for name in ("max_length", "system", "loss_on")}, "is_chat": self.is_chat},
            new_columns=dict.fromkeys(known, "string"),
            ends={name: getattr(tokenizer, name) for name in model_places.ENDS},
            **note_form(needed, chosen, optional=known),
        )
        out.info[NOTE]["turns"] = self.is_chat
        reader = AnswerReader(tokenizer, out.info, self.table.places, self.context, is_new=False)
        answers = {name: column for name, column in texts.items() if name != "prompt"}
        found, out.info["cut_answers"] = reader.read(texts["prompt"], list(answers.values()))
        return dict(zip(answers, found, strict=True))

    def ask_reference(
        self, answers: Mapping[str, Sequence[Mapping[str, Any]]], out: PrepareOutput
    ) -> dict[str, list[float]]:
        """The columns `reference_…` with the logarithms of answers' probabilities by the reference, which is noted.

        Raises DataError: one is not finite. ConfigError: transformers cannot load the model.
        """
        chosen, place = self.options, model_places.one_of(self.options, field=FIELD)
        require_choice(chosen["dtype"], model_places.DTYPES, field=f"{FIELD}.dtype")
        noted = {name: chosen[name] for name in REFERENCE if name != "load_in" or chosen[name] is not None}
        out.info.update(noted, reference=chosen["pretrained"], has_place=place is not None)
        model, pad = build_first(out.info, place, field=FIELD), out.info["ends"]["pad_token_id"]
        scores = score_answers(model, [row for column in answers.values() for row in column], pad=pad)
        if not np.isfinite(scores).all():
            row = int(np.flatnonzero(~np.isfinite(scores))[0]) % len(self.table)
            what = f"{self.table.places[row]}: the reference gives this row no finite probability."
            raise DataError(what, field=FIELD, value=place, remedy="Set prepare.options.dtype=float32.")
        columns = scores.reshape(len(answers), -1).tolist()
        return {f"reference_{name}": column for name, column in zip(answers, columns, strict=True)}


# -- tokens -----------------------------------------------------------------------------------------------------------
class AnswerReader:
    """Makes tokens of prompts with answers: of texts as they are, or of turns by the tokenizer's chat template.

    `info` is what prepare noted: `max_length`, `prompt`, and for conversations `is_chat`, `system` and `loss_on`; the
    context has columns of `CONTEXT`. Errors name the places of the rows, which may be new.
    """

    def __init__(
        self,
        tokenizer: Any,
        info: Mapping[str, Any],
        places: Sequence[str],
        context: Mapping[str, Sequence[str]],
        *,
        is_new: bool = True,
    ) -> None:
        self._tokenizer, self._info, self._places, self._context = tokenizer, info, places, context
        self._sources, self._limit = ("rows", "rows") if is_new else (SOURCES, f"{FIELD}.max_length")
        self._template: Any = ChatTemplate(tokenizer, None) if info.get("is_chat") else None

    def read(self, prompts: Sequence[str], answers: Sequence[Sequence[str]]) -> tuple[list[list[dict[str, Any]]], int]:
        """Columns of answers, as rows that `collate_documents` takes, and how many of them are cut.

        Raises DataError: a prompt leaves no room for an answer, or the template does not take rows, which are listed.
        """
        longest = self._info["max_length"]
        made = self._render_all(prompts, answers) if self._template else self._follow_all(self.ask(prompts), answers)
        found, cut = [], 0
        for column in made:
            self._require_room([int(is_answer.argmax()) for _, is_answer in column])
            cut += sum(len(tokens) > longest for tokens, _ in column)
            rows = [(tokens[:longest], is_answer[:longest]) for tokens, is_answer in column]
            found.append([{"input_ids": ids, "lengths": [len(ids)], "trained": is_answer} for ids, is_answer in rows])
        return found, cut

    def ask(self, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of prompts, as a text that goes on or with the request for an answer. Raises as `read`."""
        if self._template is None:
            end = self._tokenizer.eos_token_id
            made = self._tokenizer(list(prompts), verbose=False)["input_ids"] if prompts else []
            made = [ids[:-1] if end is not None and len(ids) > 1 and ids[-1] == end else ids for ids in made]
        else:
            made = [self._render(row, prompt)[0] for row, prompt in enumerate(prompts)]
        self._require_room(list(map(len, made)))
        return made

    def _follow_all(self, prompts: Sequence[list[int]], answers: Sequence[Sequence[str]]) -> list[list[_Scored]]:
        """Prompts and their answers, all with the token for the end."""
        end, found = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id], []
        for texts in answers:
            made = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
            whole = [([*prompt, *tokens, *end], len(prompt)) for prompt, tokens in zip(prompts, made, strict=True)]
            found.append([(tokens, np.arange(len(tokens)) >= start) for tokens, start in whole])
        return found

    def _render_all(self, prompts: Sequence[str], answers: Sequence[Sequence[str]]) -> list[list[_Scored]]:
        """Conversations with the answers. Raises DataError with all rows that the template does not take."""
        found, problems = list[list[_Scored]](), dict[str, DataError]()
        for row, (prompt, *texts) in enumerate(zip(prompts, *answers, strict=True)):
            try:
                found.append([self._render(row, prompt, text) for text in texts])
            except DataError as error:
                problems[error.message] = error
        raise_listed(list(problems.values()))
        return [list(column) for column in zip(*found, strict=True)]

    def _render(self, row: int, prompt: str, answer: str | None = None) -> _Scored:
        """A conversation up to the end of its last answer; without an answer with the request for one."""
        turns = turns_of(answer or "", "assistant")
        values: dict[str, Any] = {name: column[row] for name, column in self._context.items()}
        values |= {"prompt": turns_of(prompt, "user"), **({} if answer is None else {"completion": turns})}
        place, system = self._places[row], self._info["system"]
        conversation = read_conversation(place, values, "prompt", system=system, asks=answer is None)
        try:
            if conversation.fault:
                raise FaultyError(conversation.fault)
            if answer is None:
                tokens = self._template.ask(conversation.messages, conversation.tools)
                return tokens, np.zeros(len(tokens), bool)
            begun = len(conversation.messages) - len(turns)
            trained = [number >= begun and is_trained for number, is_trained in enumerate(conversation.trained)]
            read = self._template.tokenize(conversation._replace(trained=trained), loss_on=self._info["loss_on"])
        except FaultyError as fault:
            raise DataError(f"{place}: {fault}.", field=self._sources, remedy="Correct the row.") from fault
        stop = int(read[1].nonzero()[0][-1]) + 1
        return read[0][:stop].tolist(), read[1][:stop]

    def _require_room(self, starts: Sequence[int]) -> None:
        longest, name = self._info["max_length"], self._info["prompt"]
        for place, start in zip(self._places, starts, strict=True):
            if start >= longest:
                what = f"{place}, column '{name}': the prompt has {start:,} tokens, and with its answer at most"
                remedy = "Shorten the prompt, or set a greater max_length, as far as the model reads it."
                raise DataError(f"{what} {longest:,} are read.", field=self._limit, value=longest, remedy=remedy)


def collate_answers(rows: Sequence[Mapping[str, Any]], data: DataInfo, names: Sequence[str]) -> dict[str, Tensor]:
    """Make a batch: `lengths` of answers ``[rows, answers]``, answers, and what rows have of `labels` and `reference`.

    The answers are `input_ids`, `attention_mask` and `targets` ``[answers x rows, tokens]``, one column behind the
    other. Rows with prompts alone give `input_ids` and `attention_mask` ``[rows, tokens]``, filled up at the beginning.

    Args:
        names: the facts that name the columns of answers; new rows may have some of them.

    Raises:
        DataError: the prompt of a new row leaves no room for an answer, or the template does not take it.
    """
    info, tokenizer = data.info, kept_tokenizer(data)
    places = [f"Row {number} of the batch" for number in range(len(rows))]
    context = {name: [row.get(name) or "" for row in rows] for name in CONTEXT if info.get("is_chat")}
    reader = AnswerReader(tokenizer, info, places, context)
    known = [info[name] for name in names if info[name] in rows[0]]
    columns = [[str(row.get(column, "")) for row in rows] for column in (info["prompt"], *known)]
    if not known:
        ids, mask = packed_batches.batch_prompts(reader.ask(columns[0]), pad=tokenizer.pad_token_id)
        return {"input_ids": ids, "attention_mask": mask}
    prompts, *texts = split_prompts(*columns, places=places) if info.get("is_chat") else columns
    answers = [answer for column in reader.read(prompts, texts)[0] for answer in column]
    batch = packed_batches.collate_documents(answers, pad=tokenizer.pad_token_id)
    targets = batch["targets"] = batch.pop("labels")
    made = {"lengths": torch.stack((targets != packed_batches.NO_TARGET).sum(dim=1).chunk(len(known)), dim=1)}
    if "labels" in rows[0]:
        made["labels"] = torch.tensor([int(row["labels"]) for row in rows])
    if f"reference_{names[0]}" in rows[0]:
        made["reference"] = torch.tensor([[row[f"reference_{name}"] for name in names] for row in rows])
    return made | batch


# -- the reference ----------------------------------------------------------------------------------------------------
def log_probabilities(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The logarithms of answers' probabilities by a model ``[answers]``: sums over their tokens, after all before.

    Of a batch with `input_ids`, `attention_mask` and `targets` ``[answers, tokens]``.
    """
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
    return -preprocess_logits_for_metrics(logits, batch["targets"])[:, 0]


def score_answers(model: Any, answers: Sequence[Mapping[str, Any]], *, pad: int) -> np.ndarray:
    """The logarithms of the answers' probabilities by a model, float64 ``[answers]``; on a GPU where there is one."""
    if not getattr(model, "is_quantized", False):  # such a model is where it stays
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    device = next(model.eval().parameters()).device
    order = sorted(range(len(answers)), key=lambda row: -len(answers[row]["input_ids"]))  # little padding
    found = np.empty(len(answers))
    with torch.no_grad():
        for start in range(0, len(order), _TOGETHER):
            rows = order[start : start + _TOGETHER]
            batch = packed_batches.collate_documents([answers[row] for row in rows], pad=pad)
            batch["targets"] = batch.pop("labels")
            on_device = {name: tensor.to(device) for name, tensor in batch.items()}
            found[rows] = log_probabilities(model, on_device).double().cpu().numpy()
    return found


def build_first(info: Mapping[str, Any], place: str | None, *, field: str) -> Any:
    """The model that training begins with, on the CPU; the generators of random numbers stay as they are.

    It is by the facts that prepare noted, at random without a `place`. `field` is the setting that names it. Raises as
    `load_causal_model`.
    """
    settings = model_places.quantized(info.get("load_in"), place=place, adapted=True, field=field)
    if place is not None:
        known = {name: info[name] for name in ("dtype", "vocabulary")}
        return model_places.load_causal_model(place, field=field, settings=settings, **known)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(info["seed"])
        facts = {"length": info["max_length"], "vocabulary": info["vocabulary"], "ends": info["ends"]}
        return model_places.new_causal_model(info["config"], **facts, field="prepare.options")


def build_policy(chosen: Mapping[str, Any], data: DataInfo, *names: str) -> nn.Module:
    """Build the model that the reference is, with adapters on request; it keeps the loss's settings for its Trainer.

    Raises ConfigError: transformers cannot load it, or it is not that of prepare.
    """
    require_above_zero("beta", chosen["beta"])
    place = model_places.one_of(chosen, field="train.model")
    _require_reference(chosen, place, data)
    adapted = bool(chosen["adapter"])
    model_places.quantized(data.info.get("load_in"), place=place, adapted=adapted, field="prepare.options")
    build = partial(build_first, data.info, place, field="train.model")
    model = build()
    model.config.use_cache = False  # training has no use for it
    remedy = "Give pretrained or folder in prepare.options and in train.model."
    built = model_places.add_adapters(model, chosen["adapter"], place=place, remedy=remedy)
    if data.info.get("is_chat"):
        packed_batches.stop_at(built, packed_batches.end_tokens(kept_tokenizer(data)))
    policy: Any = built
    policy.preference = {name: chosen[name] for name in ("beta", *names)}
    policy.build_first, policy.new_tokens = build, chosen["new_tokens"]
    return built


def _require_reference(chosen: Mapping[str, Any], place: str | None, data: DataInfo) -> None:
    for name, part in (("config", "configuration"), ("load_in", "type of weights")):
        if chosen[name] is not None:
            what = f"Training begins with the reference, so its {part} belongs to prepare."
            remedy = f"Move it to prepare.options.{name}."
            raise ConfigError(what, field=f"train.model.{name}", value=chosen[name], remedy=remedy)
    if (place is not None) != data.info["has_place"] or chosen["pretrained"] != data.info["reference"]:
        reference = data.info["reference"] or ("from a folder" if data.info["has_place"] else "one at random")
        what = f"Training begins with the reference, and in prepare that is {reference}."
        remedy = "Name one model in train.model and in prepare.options."
        raise ConfigError(what, field="train.model", value=place, remedy=remedy)


def require_above_zero(name: str, value: float) -> None:
    """Raise ConfigError for a setting of the loss that is not a number above 0."""
    if not 0 < value < float("inf"):
        what, remedy = "The loss has no sense with this number.", "Give a number above 0, such as 0.1."
        raise ConfigError(what, field=f"train.model.{name}", value=value, remedy=remedy)


# -- training ---------------------------------------------------------------------------------------------------------
class AnswerTrainer(RowLossTrainer):
    """A Trainer of rows with answers, whose `judge` gives their losses and the rewards ``[rows, answers]``."""

    def answer(self, model: nn.Module, inputs: Any) -> Tensor:
        """The predictions for rows without labels ``[rows, …]``."""
        raise NotImplementedError

    def compare(self, inputs: Any) -> Tensor:
        """The reference's values of the answers ``[rows, answers]``; zeros without a reference."""
        reference: Tensor = inputs.get("reference", torch.zeros_like(inputs["lengths"]))
        return reference

    @override
    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            if "labels" not in inputs:
                return None, self.answer(model, inputs), None
            losses, rewards = self.judge(model, inputs)
        known = torch.cat((self.compare(inputs).double(), inputs["lengths"].double()), dim=1)
        return losses.mean(), *((None, None) if prediction_loss_only else (rewards, (inputs["labels"], known)))


class PolicyTrainer(AnswerTrainer):
    """A Trainer that compares a model to the reference, and generates an answer for a prompt that has none."""

    _first: Any = None

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
        if any(param.is_meta for param in self.model.parameters()):
            return  # without values there is nothing to compare
        rows: Any = self.train_dataset
        device = next(self.model.parameters()).device
        inputs = {name: tensor.to(device) for name, tensor in self.data_collator([rows[0]]).items()}
        with packed_batches.evaluating(self.model):
            own, reference = self.log_probabilities(self.model, inputs), inputs["reference"]
        is_rough = self.args.bf16 or self.args.fp16 or own.dtype != next(self.model.parameters()).dtype
        share, nats = (1e-2, 0.5) if is_rough else (1e-3, 1e-2)
        if bool(((own - reference).abs() > nats + share * reference.abs()).any()):
            what = f"The model gives the first row's answers the log-probabilities {_shown(own)}, and the reference"
            remedy = "Name one model in train.model and in prepare.options; if it was changed, --force prepare."
            what += f" gave them {_shown(reference)}: it is another model."
            raise ConfigError(what, field="train.model", remedy=remedy)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the loss."""
        built: Any = self.model
        return dict(built.preference)

    def log_probabilities(self, model: nn.Module, inputs: Any) -> Tensor:
        """The logarithms of the answers' probabilities ``[rows, answers]``."""
        with self.autocast_smart_context_manager():
            found = log_probabilities(model, inputs)
        return torch.stack(found.chunk(len(found) // len(inputs["lengths"])), dim=1)

    @override
    def answer(self, model: nn.Module, inputs: Any) -> Tensor:
        built: Any = self.model
        if "lengths" in inputs:
            device = inputs["input_ids"].device  # the reference is the model without adapters, or as it began
            with model_places.as_it_began(self.model, lambda: self._build_first(device)) as reference:
                known = self.log_probabilities(reference, inputs)
            return (self.log_probabilities(model, inputs) - known) * float(self.settings["beta"])
        ids = inputs["input_ids"]
        wanted = torch.full((len(ids),), built.new_tokens, device=ids.device)
        with self.autocast_smart_context_manager():  # always the most likely token
            return packed_batches.continue_prompts(built, ids, inputs["attention_mask"], wanted)

    def _build_first(self, device: torch.device) -> Any:
        if self._first is None:
            built: Any = self.model
            self._first = built.build_first().to(device).eval()
        return self._first


def _shown(values: Tensor) -> str:
    return " and ".join(f"{value:.1f}" for value in values.flatten().tolist())


# -- what is measured and written -------------------------------------------------------------------------------------
def share_right(scores: Any) -> float:
    """The share of rows ``[rows, 2]`` whose first score is higher; one of equal scores is half right."""
    margins = np.asarray(scores, np.float64) @ (1, -1)
    return float(((margins > 0) + 0.5 * (margins == 0)).mean())


def beside_rules(name: str, right: float, reference: float, longer: float, overall: float) -> dict[str, float]:
    """A metric of which 0.5 is chance, next to that of the reference and of a rule of lengths.

    The rule is always the longer answer, or always the shorter one, whichever is better `overall`.
    """
    length = longer if overall >= 0.5 else 1 - longer
    of_rules = {f"reference_{name}": reference, f"length_{name}": length}
    return {name: right, **of_rules, f"{name}_over_reference": right - reference, f"{name}_over_length": right - length}
