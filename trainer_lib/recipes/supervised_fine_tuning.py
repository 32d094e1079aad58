"""The recipe supervised-fine-tuning: a model learns to answer from conversations, whole or by adapters.

    name: helper
    recipe: supervised-fine-tuning
    prepare:
      sources: [chats.jsonl]  # messages, ShareGPT, Alpaca, prompt and completion
      options: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, length: 1024}
    train:
      model: {pretrained: Qwen/Qwen2.5-0.5B-Instruct, adapter: {kind: lora, rank: 16}}
      args: {num_train_epochs: 1, learning_rate: 1.0e-4, global_batch_size: 16}
    evaluate: {splits: [validation, test]}

The loss is on what the assistant writes, the token for its end included. Conversations of training share rows, in which
none sees another one. `trainflow plan` and the report show what is trained of five conversations.

Without `pretrained` or `folder` a byte-level vocabulary is learned from the conversations of training.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_lib.base.json_text import parse_json
from trainer_lib.base.outputs import EvalPrediction
from trainer_lib.base.suggestions import counted
from trainer_lib.data.rows.mixture import SOURCE
from trainer_lib.errors import DataError
from trainer_lib.recipes.causal_language_modeling import Trainer
from trainer_lib.recipes.causal_language_modeling import build_model as build_text_model
from trainer_lib.recipes.causal_language_modeling import compute_metrics as measure_texts
from trainer_lib.recipes.causal_language_modeling import prediction_columns as describe_texts
from trainer_lib.recipes.shared.model_places import ENDS, require_positions
from trainer_lib.recipes.shared.recipe_options import PathOptions, choose, require_choice
from trainer_lib.recipes.tables.table_files import note_form
from trainer_lib.recipes.texts import packed_batches
from trainer_lib.recipes.texts.conversations import FIELD, ConversationSplits, Faults, read_question
from trainer_lib.recipes.texts.judged_prompts import answer_prompts
from trainer_lib.recipes.texts.packed_batches import preprocess_logits_for_metrics as sum_likelihoods
from trainer_lib.recipes.texts.packing import Document, new_counts, pack_documents
from trainer_lib.recipes.texts.templates import KINDS, LOSSES, ChatTemplate, FaultyError, find_template
from trainer_lib.recipes.texts.tokenizing import decode_tokens, kept_tokenizer

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo, PrepareOutput

__all__ = ["Trainer", "after_evaluate", "build_model", "collate", "compute_metrics", "prediction_columns", "prepare",
           "preprocess_logits_for_metrics"]  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "shape": None,  # of rows (`texts.conversations.SHAPES`); None: by their columns
    "template": None,  # a name of `texts.templates.TEMPLATES`, FILE.jinja, or a template; None: the tokenizer's
    "system": None,  # the first turn of conversations that have no turn of the system
    "loss_on": "assistant",  # turns of the assistant; or the last of these, or all tokens
    "faulty": 0.0,  # the share of conversations that may be left out
    "most_cut": 1.0,  # the share of conversations whose answers may be cut
    "rename": {},  # name of a column in the files -> its name here
    "read": {},  # how tables are written (`data.rows.reading.Reading`)
    "files": {},  # split -> its file
    "split": {},  # by random, group, time or column (`trainer_lib.recipes.tables.splitting`)
    "pretrained": None,  # name of the model on the Hub whose tokenizer is used
    "folder": None,  # or its folder
    "pad_token": None,  # for a tokenizer that has none
    "vocabulary": 4096,  # tokens of a vocabulary that is learned
    "length": 1024,  # the most tokens of a row
    "overlong": None,  # longer conversations: cut, drop or refuse
    "pack": ["train"],  # splits whose conversations share rows
    "isolate": "positions",  # keeps conversations of a row apart; or mask
}
"""Every option of `prepare`, with its default."""
PROMPT = "prompt"
"""The column of new rows with what a user says."""
QUESTION = "conversation"
"""The column in which new rows have their turns, tools and system prompt together, as JSON."""
_ASKED = [PROMPT, "messages", "conversations", "instruction", "input", "history", "system", "tools"]
_SHOWN, _SHOWN_TOKENS = 5, 600


def prepare(options: PathOptions, out: PrepareOutput) -> Mapping[str, Iterator[dict[str, Any]]]:
    """Read the conversations, render them by a chat template, and make rows of tokens with those that are trained.

    Returns:
        For every split its rows, as `pack_documents` makes them, with `trained`.
    """
    chosen = choose(options, DEFAULTS, field=FIELD)
    packed_batches.require_rows(chosen)
    require_choice(chosen["loss_on"], LOSSES, field=f"{FIELD}.loss_on")
    if chosen["overlong"] is not None:
        require_choice(chosen["overlong"], ("cut", "drop", "refuse"), field=f"{FIELD}.overlong")
    require_positions(chosen, "length", field=FIELD)
    splits = ConversationSplits(chosen, out.sources, out.mixture)
    shapes = _refuse_faults(splits, chosen["faulty"])
    conversations = counted(shapes.total(), "conversation")
    of_shapes = ", ".join(f"{count:,} in the shape {shape}" for shape, count in shapes.most_common())
    read = (conversation for conversation in splits.read("train") if not conversation.fault)
    template = find_template(chosen, (text for conversation in read for text in conversation.texts()), out)
    own = {"faulty": 0, "cut": 0, "answers_cut": 0, "ended_by_pad": 0, "tokens_trained": 0}
    counts = {name: {**new_counts(), **own} for name in splits.names}
    mixed = [SOURCE] if out.mixture else []  # new rows need not say where they are from
    out.info.update(
        {name: chosen[name] for name in ("length", "overlong", "isolate", "loss_on", "system")},
        new_columns={PROMPT: "string", packed_batches.NEW_TOKENS: "int64", QUESTION: "string"},
        packed=chosen["pack"],
        shape=", ".join(shapes),
        shapes=dict(shapes),
        chat_template=template.tokenizer.chat_template,
        summary=[f"{conversations}: {of_shapes}."],  # sentences for the splits follow when its rows were read
        unpublished=["conversations.json", "conversations.txt"],  # they quote the data
        packing=counts,  # complete when all rows were read
        ends={name: getattr(template.tokenizer, name) for name in ENDS},
        **note_form(
            {},
            chosen,
            optional=[packed_batches.NEW_TOKENS, *_ASKED, "input_ids", "lengths", "trained", *mixed],
            gathered={"into": QUESTION, "names": _ASKED, "unless": "input_ids"},
        ),
    )
    _show(splits, template, chosen["loss_on"], out)
    return {
        name: pack_documents(
            _tokenize(splits.read(name), template, chosen, counts[name], partial(_summarize, out, name)),
            length=chosen["length"],
            overlong="refuse",  # what is longer was cut or dropped before
            packed=name in chosen["pack"],
            counts=counts[name],
        )
        for name in splits.names
    }


def _refuse_faults(splits: ConversationSplits, most: float) -> Counter[str]:
    """The number of conversations by shape. Raises DataError for those that no template can take, all of them."""
    faults, shapes = Faults(most), Counter[str]()
    for conversation in splits.read_all():
        shapes[conversation.shape or "unknown"] += 1
        if conversation.fault:
            faults.add(conversation.place, conversation.fault)
    faults.require_few(shapes.total())
    return shapes


def _tokenize(
    conversations: Iterator[Any],
    template: ChatTemplate,
    chosen: Mapping[str, Any],
    counts: dict[str, int],
    summarize: Callable[[dict[str, int], Faults], None],
) -> Iterator[Document]:
    """The tokens of conversations; those with a fault are counted and left out, as far as that is allowed."""
    faults, length, count = Faults(chosen["faulty"]), chosen["length"], 0
    cut, pad = Faults(chosen["most_cut"], "most_cut"), template.tokenizer.pad_token_id
    for conversation in conversations:
        count += 1
        try:
            if conversation.fault:
                raise FaultyError(conversation.fault, "row")
            tokens, trained = template.tokenize(conversation, loss_on=chosen["loss_on"])
            if len(tokens) > length:
                if chosen["overlong"] == "drop":
                    counts["documents_dropped"] += 1
                    counts["tokens_lost"] += len(tokens)
                    continue
                lost = int(trained[length:].sum())
                tokens, trained = _cut(tokens, trained, length, chosen["overlong"])
                counts["cut"] += 1
                if lost:
                    cut.add(conversation.place, f"{lost:,} tokens of its answers are cut")
        except FaultyError as fault:
            faults.add(conversation.place, str(fault), fault.kind)
            counts["faulty"] += 1
            continue
        counts["tokens_trained"] += int(trained[1:].sum())
        counts["ended_by_pad"] += pad is not None and bool((tokens[trained] == pad).any())
        yield Document(conversation.place, tokens, trained, conversation.source)
    counts["answers_cut"] = cut.kinds.total()
    faults.require_few(count)
    cut.require_few(count)
    summarize(counts, faults)


def _cut(tokens: np.ndarray, trained: np.ndarray, length: int, overlong: str | None) -> tuple[np.ndarray, np.ndarray]:
    if overlong != "cut":
        what = f"it has {len(tokens):,} tokens, and a row has {length:,} "
        raise FaultyError(what + "(prepare.options.overlong=cut or drop, or a greater length)", "overlong")
    if not trained[1:length].any():
        raise FaultyError(f"none of its first {length:,} tokens is trained", "untrained")
    return tokens[:length], trained[:length]


def _summarize(out: PrepareOutput, split: str, counts: dict[str, int], faults: Faults) -> None:
    """Append what became of a split to the summary: what is trained, left out, cut, and ended by the pad token."""
    share = counts["tokens_trained"] / max(counts["tokens_in"], 1)
    parts = [f"{split}: {counts['documents']:,} with {counts['tokens_in']:,} tokens, {share:.1%} of them trained"]
    kinds = (f"{count:,} {KINDS[kind]}" for kind, count in faults.kinds.most_common())
    parts += [f"{faults.kinds.total():,} left out: {', '.join(kinds)}"] if faults.kinds else []
    parts += [f"{counts['documents_dropped']:,} dropped as too long"] if counts["documents_dropped"] else []
    parts += [f"{counts['answers_cut']:,} with answers that are cut"] if counts["answers_cut"] else []
    if counts["ended_by_pad"]:
        parts.append(f"{counts['ended_by_pad']:,} train the token that fills up rows, as it ends answers too")
    out.info["summary"].append("; ".join(parts) + ".")


def _show(splits: ConversationSplits, template: ChatTemplate, loss_on: str, out: PrepareOutput) -> None:
    """Write the beginnings of conversations of training with what is trained, for people and for `trainflow plan`."""
    text, shown = "What is trained stands between ⟦ and ⟧.\n", list[dict[str, Any]]()
    intact = (conversation for conversation in splits.read("train") if not conversation.fault)
    for conversation in islice(intact, _SHOWN):
        try:
            parts = template.show(conversation, loss_on=loss_on, most=_SHOWN_TOKENS)
        except FaultyError as fault:
            parts = [(f"({fault})", False)]
        marked = "".join(f"⟦{part}⟧" if is_trained else part for part, is_trained in parts)
        text += f"{'-' * 80}\n{conversation.place}\n{marked}\n"
        shown.append({"place": conversation.place, "parts": parts})
    out.write_file("conversations.txt", text.encode())
    out.write_file("conversations.json", json.dumps(shown).encode())


def build_model(options: PathOptions, data: DataInfo) -> nn.Module:
    """Build the model as for texts; what it generates ends with the assistant's turn as well.

    Raises ConfigError as of texts.
    """
    model = build_text_model(options, data)
    packed_batches.stop_at(model, packed_batches.end_tokens(kept_tokenizer(data)))
    return model


def collate(rows: list[dict[str, Any]], data: DataInfo) -> dict[str, Tensor]:
    """Make a batch of `input_ids`, `labels`, and `position_ids` or `attention_mask` ``[batch, tokens]``.

    New rows have a conversation in one of the shapes, or what a user says in `prompt`; and perhaps `new_tokens`, the
    most tokens of the answer (64).
    """
    if "input_ids" in rows[0]:
        return packed_batches.collate_rows(rows, data.info)
    template = ChatTemplate(kept_tokenizer(data), None)
    wanted = [int(row.get(packed_batches.NEW_TOKENS, 64)) for row in rows]
    prompts = [ask(row, template, data, new) for row, new in zip(rows, wanted, strict=True)]
    ids, mask = packed_batches.batch_prompts(prompts, pad=data.info["ends"]["pad_token_id"] or 0)
    return {"prompt_ids": ids, "prompt_mask": mask, "wanted": torch.tensor(wanted)}


def ask(row: Mapping[str, Any], template: ChatTemplate, data: DataInfo, new: int) -> list[int]:
    """The tokens of a new row's conversation with the beginning of the answer, which has up to `new` tokens.

    Raises DataError: the conversation is faulty, or the row has no room for the answer.
    """
    length, gathered = data.info["length"], parse_json(row.get(QUESTION) or "{}")
    asked = read_question({**row, **gathered}, system=data.info["system"])
    try:
        tokens = template.ask(asked.messages, asked.tools)
    except FaultyError as fault:
        raise DataError(f"{fault}.", field="rows", remedy="Correct the row.") from fault
    if not 0 < new < length or len(tokens) + new > length:
        column = asked.shape or PROMPT
        what = f"column '{column}': {len(tokens):,} tokens and {new:,} new ones exceed the {length:,} of a row."
        raise DataError(what, field="rows", value=column, remedy="Shorten it, or set fewer new_tokens.")
    return tokens


def preprocess_logits_for_metrics(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Reduce logits ``[batch, tokens, vocabulary]`` to ``[batch, 3]``: negative log-likelihood, targets, those right.

    Without labels they are reduced already.
    """
    if labels is None:
        return logits
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]).sum(dim=1, keepdim=True)
    sums = sum_likelihoods(logits, labels)
    return torch.cat((sums, right.to(sums.dtype)), dim=1)


def compute_metrics(evaluation: EvalPrediction) -> dict[str, float]:
    """Measure the perplexity of answers, next to that of their tokens' frequencies, and the share of right tokens."""
    _, targets, right = np.asarray(evaluation.predictions, np.float64).sum(axis=0)
    return {**measure_texts(evaluation), "token_accuracy": float(right / max(targets, 1))}


def prediction_columns(predictions: np.ndarray, data: DataInfo) -> dict[str, Sequence[Any]]:
    """Turn ``[rows, 3]`` into columns about the answers of rows, or tokens into the answers to new rows."""
    if predictions.dtype.kind in "iu":
        return {"answer": decode_tokens(predictions, data)}
    _, targets, right = predictions.astype(np.float64).T
    return {**describe_texts(predictions[:, :2], data), "token_accuracy": right / np.maximum(targets, 1)}


def after_evaluate(model: nn.Module, data: DataInfo, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Answer `evaluate.options.prompts` before and after training (`trainer_lib.recipes.texts.judged_prompts`)."""
    template, system = ChatTemplate(kept_tokenizer(data), None), data.info["system"]
    first = [] if system is None else [{"role": "system", "content": system}]

    def ask(prompt: str) -> list[int]:
        return template.ask([*first, {"role": "user", "content": prompt}])

    return answer_prompts(model, template.tokenizer, ask, data, options)
