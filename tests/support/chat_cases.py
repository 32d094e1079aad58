"""Chat templates in the manner of ten families of public models, and the loss of TRL on conversations beside ours.

python -m tests.support.chat_cases answer.json     (where TRL can be imported)
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer_lib.recipes.texts.conversations import read_conversation
from trainer_lib.recipes.texts.packed_batches import collate_rows
from trainer_lib.recipes.texts.packing import Document, new_counts, pack_documents
from trainer_lib.recipes.texts.templates import END, TURN, ChatTemplate
from trainer_lib.recipes.texts.tokenizing import learn_byte_tokenizer

CONTENT, ROLE = "{{ message['content'] }}", "{{ message['role'] }}"
#: Family -> what its template writes for a turn, for an answer, before an answer that is asked for, and at first.
FAMILIES = {
    "chatml": (f"{TURN}{ROLE}\n{CONTENT}{END}\n", f"{TURN}assistant\n{CONTENT}{END}\n", f"{TURN}assistant\n"),
    "llama 3": (
        f"<|h|>{ROLE}<|/h|>\n\n{CONTENT}<|eot|>",
        f"<|h|>assistant<|/h|>\n\n{CONTENT}<|eot|>",
        "<|h|>assistant<|/h|>\n\n",
        "<|begin|>",
    ),
    "mistral": (f"[INST] {CONTENT} [/INST]", f"{CONTENT}</s>", "", "<s>"),
    "gemma": (f"<turn>{ROLE}\n{CONTENT}<end>\n", f"<turn>model\n{CONTENT}<end>\n", "<turn>model\n", "<s>"),
    "zephyr": (f"<|{ROLE}|>\n{CONTENT}</s>\n", f"<|assistant|>\n{CONTENT}</s>\n", "<|assistant|>\n"),
    "phi 3": (f"<|{ROLE}|>\n{CONTENT}<end>\n", f"<|assistant|>\n{CONTENT}<end>\n", "<|assistant|>\n"),
    "deepseek": (f"<U>{CONTENT}", f"<A>{CONTENT}</s>", "<A>", "<s>"),
    "vicuna": (f"{ROLE}: {CONTENT} ", f"assistant: {CONTENT}</s>", "assistant: "),
    "command": (f"<turn><U>{CONTENT}<end>", f"<turn><A>{CONTENT}<end>", "<turn><A>"),
    "granite": (f"<|h|>{ROLE}<|/h|>{CONTENT}<end>\n", f"<|h|>assistant<|/h|>{CONTENT}<end>\n", "<|h|>assistant<|/h|>"),
}
_SPECIAL = (TURN, "<|h|>", "<|/h|>", "<|eot|>", "<|begin|>", "<turn>", "<end>", "<U>", "<A>", "<s>", "</s>", END)


def template_text(turn: str, answer: str, ask: str, first: str = "") -> str:
    """A template of a text for each role, and for each answer."""
    loop = "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    loop += answer + "{% else %}" + turn + "{% endif %}{% endfor %}"
    return first + loop + "{% if add_generation_prompt %}" + ask + "{% endif %}"


def marked_text(turn: str, answer: str, ask: str, first: str = "") -> str:
    """A template as of `template_text`, with marks around what the assistant writes and the token for its end."""
    head, _, tail = answer.partition(CONTENT)
    marked = head + "{% generation %}" + CONTENT + tail.rstrip() + "{% endgeneration %}"
    marked += "{{ '\\n' }}" if tail.endswith("\n") else ""  # Jinja removes a line's end behind a block
    return template_text(turn, marked, ask, first)


def family_tokenizer() -> Any:
    """A tokenizer that knows the marks of all families."""
    return learn_byte_tokenizer(["one two short model user assistant"], vocabulary=300, special=_SPECIAL)


# ------------------------------------------------------------------------------------------------ the loss beside TRL's
def chats(count: int = 6) -> list[list[dict[str, str]]]:
    """Conversations of one to three questions and answers, of many lengths."""
    draw = random.Random(0)
    words, roles = ("one", "two", "short", "model", "of", "a"), ("user", "assistant")
    sizes = (2 * (1 + number % 3) for number in range(count))
    return [
        [{"role": roles[turn % 2], "content": " ".join(draw.choices(words, k=1 + turn))} for turn in range(turns)]
        for turns in sizes
    ]


def new_model(tokens: int) -> Any:
    """A small Llama, equal at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=tokens, num_hidden_layers=2, use_cache=False, **sizes))


def chat_rows(
    text: str, *, packed: bool, count: int = 6, length: int = 1024
) -> tuple[list[dict[str, Any]], Callable[..., Any]]:
    """So many of `chats` as rows of supervised-fine-tuning, and the function that makes a batch of them."""
    tokenizer = family_tokenizer()
    template = ChatTemplate(tokenizer, text)
    read = (read_conversation("here", {"messages": chat}, "messages") for chat in chats(count))
    documents = (Document("here", *template.tokenize(conversation)) for conversation in read)
    rows = pack_documents(documents, length=length, overlong="refuse", packed=packed, counts=new_counts())
    info = {"ends": {"pad_token_id": tokenizer.pad_token_id}, "isolate": "positions"}
    return list(rows), partial(collate_rows, info=info)


def our_loss(text: str, *, packed: bool) -> float:
    """The loss of one batch as supervised-fine-tuning makes it."""
    rows, collate = chat_rows(text, packed=packed)
    with torch.no_grad():
        return float(new_model(len(family_tokenizer()))(**collate(rows))["loss"])


def loss_of_trl(text: str, folder: str, *, packed: bool, length: int = 1024) -> float:
    """The loss of the same batch as TRL's SFTTrainer makes it, with `assistant_only_loss`."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = family_tokenizer()
    tokenizer.chat_template = text
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    whole = {"max_length": length, "packing": packed, "per_device_train_batch_size": 6}
    trainer = SFTTrainer(
        model=new_model(len(tokenizer)),
        args=SFTConfig(folder, assistant_only_loss=True, train_sampling_strategy="sequential", **whole, **quiet),
        train_dataset=Dataset.from_list([{"messages": chat} for chat in chats()]),
        processing_class=tokenizer,
    )
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader()))))


def main() -> None:
    """Write the losses of every family: TRL's, ours by marks, and ours without them; apart and packed."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            f"{name}, {'packed' if packed else 'apart'}": [
                loss_of_trl(marked_text(*parts), folder, packed=packed),
                our_loss(marked_text(*parts), packed=packed),
                our_loss(template_text(*parts), packed=packed),
            ]
            for name, parts in FAMILIES.items()
            for packed in (False, True)
        }
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
