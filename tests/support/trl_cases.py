"""TRL's trainers on tiny models: supervised fine-tuning, preferences, rewards."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from tests.support import tiny_models
from tests.support.client_cases import Case

_PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
#: Every run: a log at every step, an evaluation and a checkpoint at every second one, data in their own order, the same
#: global batch on any number of processes. Evaluation has one batch: there, a mean over several is one of their means.
RUN: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 2 // _PROCESSES}
RUN |= {"per_device_eval_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
RUN |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
RUN |= {"train_sampling_strategy": "sequential", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
RUN |= {"bf16": False}
_TEMPLATE = (
    "{% for message in messages %}{{ 'the ' if message['role'] == 'user' else 'a ' }}"
    "{{ message['content'] }} [EOS] {% endfor %}{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)


def tokenizer() -> Any:
    """A word-level tokenizer with a chat template."""
    made = tiny_models.tokenizer()
    made.chat_template = _TEMPLATE
    return made


def _sentence(number: int, length: int) -> str:
    words = tiny_models.WORDS
    return " ".join(words[(number * 5 + place * 3) % len(words)] for place in range(length))


def chats(count: int = 16) -> Any:
    """Conversations of a question and an answer, of 4 to 12 tokens."""
    from datasets import Dataset

    rows = []
    for number in range(count):
        question = {"role": "user", "content": _sentence(number, 1 + number % 4)}
        answer = {"role": "assistant", "content": _sentence(number + 7, 1 + number % 5)}
        rows.append({"messages": [question, answer]})
    return Dataset.from_list(rows)


def pairs(count: int = 16) -> Any:
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": _sentence(number, 2 + number % 3),
                "chosen": " " + _sentence(number + 3, 1 + number % 4),
                "rejected": " " + _sentence(number + 8, 2 + number % 3),
            }
            for number in range(count)
        ]
    )


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])


def rewarder() -> Any:
    """A decoder with one number per sequence."""
    import torch
    from transformers import LlamaForSequenceClassification

    config = tiny_models.llama().config
    config.num_labels = 1
    torch.manual_seed(0)
    made: Any = LlamaForSequenceClassification
    return made(config)


# ------------------------------------------------------------------------------------------------------------ builders
def _made(
    kind: str, folder: str, data: Any, given: dict[str, Any], *, train: Any = None, held: Any = None, **more: Any
) -> Any:
    """A trainer of this kind that trains on all rows, and is evaluated on the first five."""
    import trl

    return getattr(trl, f"{kind}Trainer")(
        model=rewarder() if kind == "Reward" else tiny_models.llama(),
        args=getattr(trl, f"{kind}Config")(output_dir=folder, **{**RUN, "max_length": 16, **given}),
        train_dataset=data if train is None else train,
        eval_dataset=data.select(range(5)) if held is None else held,
        processing_class=tokenizer(),
        **more,
    )


def sft(folder: str, *, streams: bool = False, peft: bool = False, **given: Any) -> Any:
    train = chats().to_iterable_dataset() if streams else None
    return _made("SFT", folder, chats(), given, train=train, peft_config=lora() if peft else None)


def sft_watched(folder: str) -> Any:
    """An `SFTTrainer` with two evaluation sets, metrics of its user, early stopping, the best model, counted tokens."""
    from transformers import EarlyStoppingCallback

    def measure(prediction: Any) -> dict[str, float]:
        right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
        return {"right": float(right.mean())}

    data = chats()
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_one_loss"}
    more = {"compute_metrics": measure, "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]}
    held = {"one": data.select(range(5)), "two": data.select(range(5, 9))}
    return _made("SFT", folder, data, {**best, "include_num_input_tokens_seen": "all"}, held=held, **more)


def dpo(folder: str, *, peft: bool = False, **given: Any) -> Any:
    """A `DPOTrainer` with a reference model, or with the adapter switched off as the reference."""
    more = {"ref_model": None, "peft_config": lora()} if peft else {"ref_model": tiny_models.llama()}
    return _made("DPO", folder, pairs(), given, **more)


def reward(folder: str, **given: Any) -> Any:
    return _made("Reward", folder, pairs().remove_columns("prompt"), given)


def kto(folder: str, **given: Any) -> Any:
    data = pairs()
    labels = [number % 3 != 0 for number in range(len(data))]
    data = data.remove_columns("rejected").rename_column("chosen", "completion").add_column("label", labels)
    return _made("KTO", folder, data, given, ref_model=tiny_models.llama())


def grpo(folder: str, **given: Any) -> Any:
    """A `GRPOTrainer` that is rewarded for answers with many different words.

    The words that it draws depend on the step alone: each Trainer draws other random numbers between two generations.
    """
    import torch
    from trl import GRPOConfig, GRPOTrainer

    class Drawn(GRPOTrainer):  # type: ignore[misc]  # its package is not installed where types are checked
        def _generate(self, prompts: Any) -> Any:
            torch.manual_seed(self.state.global_step)
            return super()._generate(prompts)

    def variety(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    data = pairs().select_columns("prompt")
    generation = {"num_generations": 2, "max_completion_length": 4, "shuffle_dataset": False}
    run = {name: value for name, value in RUN.items() if name != "train_sampling_strategy"}
    return Drawn(
        model=tiny_models.llama(),
        reward_funcs=variety,
        args=GRPOConfig(output_dir=folder, **{**run, **generation, **given}),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
    )


# ------------------------------------------------------------------------------------------------------------- loaders
def load_causal(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def load_rewarder(folder: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder)


def load_adapter(folder: str) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(tiny_models.llama(), folder)


CASES = [
    Case("SFTTrainer, conversations", sft, load_causal),
    Case("SFTTrainer, packing", partial(sft, packing=True, eval_packing=False), load_causal),
    Case("SFTTrainer, LoRA", partial(sft, peft=True), load_adapter),
    Case("SFTTrainer, streaming", partial(sft, streams=True), load_causal),
    Case("SFTTrainer, best of several sets", sft_watched, load_causal),
    Case("DPOTrainer", dpo, load_causal),
    Case("DPOTrainer, LoRA", partial(dpo, peft=True), load_adapter),
    Case("DPOTrainer, precomputed reference", partial(dpo, precompute_ref_log_probs=True), load_causal),
    Case("RewardTrainer", reward, load_rewarder),
    Case("KTOTrainer", kto, load_causal),
    Case("GRPOTrainer", grpo, load_causal),
]
