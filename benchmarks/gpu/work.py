"""What the jobs share: settings from the command line, language models, rows, and the three ways to train."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainer_lib
from benchmarks.gpu.processes import MARK

transformers: Any = importlib.import_module("transformers")  # untyped in part, and of several versions
LOOPS = ("hand", "peer", "ours")
LIBRARIES: dict[str, Any] = {"ours": trainer_lib, "peer": transformers}


def main(job: Callable[..., dict[str, Any]]) -> None:
    """Run a job with the settings in the first word of the command line, a JSON object; its last line is the result."""
    result = job(**json.loads(sys.argv[1]))
    print(MARK + json.dumps(result), flush=True)


def device(dry: bool) -> torch.device:
    """The first GPU; the CPU in a dry run."""
    return torch.device("cpu" if dry else "cuda")


def synchronize(dry: bool) -> None:
    """Wait for the GPU."""
    if not dry:
        torch.cuda.synchronize()


def language_model(name: str, *, dry: bool, dropout: float = 0.0) -> Any:
    """Build "gpt2" (124 M parameters), "llama" (1.1 B), "small" (GPT-2, 11 M) or "small llama" (14 M), on the device.

    Attention is torch's scaled dot product, which selects a flash kernel where there is one.
    """
    tiny = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 256} if dry else {}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config: Any
    if name.endswith("llama"):
        sizes = {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 4}
        if name == "small llama":
            sizes = {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4}
            heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
        if dry:
            sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=4096, use_cache=False)
    elif name == "small":
        small = {"n_layer": 4, "n_head": 6, "n_embd": 384, "vocab_size": 8192}
        config = transformers.GPT2Config(**{**small, **tiny}, n_positions=256, use_cache=False, **rates)
    else:
        config = transformers.GPT2Config(**tiny, use_cache=False, **rates)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device(device(dry)):
        return transformers.AutoModelForCausalLM.from_config(config)


class Tokens(Dataset[dict[str, Tensor]]):
    """`rows` sequences of `length` random tokens, which are their own labels."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack samples [length] to a batch [batch, length]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def settings(folder: str | Path, *, steps: int, batch: int, dry: bool, **more: Any) -> dict[str, Any]:
    """Arguments that both Trainers understand: a training that neither logs, evaluates nor saves."""
    quiet = {"logging_strategy": "no", "save_strategy": "no", "eval_strategy": "no", "report_to": "none"}
    basic = {"output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": 1e-4}
    chosen = {"optim": "adamw_torch_fused", "max_grad_norm": 1.0, "use_cpu": dry, "disable_tqdm": True}
    return {**quiet, **basic, **chosen, **more}


def callback(loop: str, **functions: Callable[..., None]) -> Any:
    """A callback of the loop's library with the given methods, called with the library's keyword arguments."""
    methods = {name: _method(function) for name, function in functions.items()}
    return type("Hook", (LIBRARIES[loop].TrainerCallback,), methods)()


def _method(function: Callable[..., None]) -> Callable[..., None]:
    def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        function(args=args, state=state, control=control, **kwargs)

    return method


def train(loop: str, model: nn.Module, rows: Dataset[Any], arguments: dict[str, Any], **hooks: Any) -> Any:
    """Train by a Trainer with hooks such as `on_step_end`; return the Trainer and what `train` returned."""
    library = LIBRARIES[loop]
    trainer = library.Trainer(
        model=model,
        args=library.TrainingArguments(**arguments),
        train_dataset=rows,
        data_collator=collate,
        callbacks=[callback(loop, **hooks)] if hooks else None,
    )
    return trainer, trainer.train()


def by_hand(model: nn.Module, rows: Dataset[Any], *, steps: int, batch: int, dry: bool) -> Iterator[Tensor]:
    """Train by the loop that people write by hand, in bf16; yields the loss after every optimizer step."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    loader = DataLoader(rows, batch, shuffle=True, collate_fn=collate, drop_last=True, pin_memory=not dry)
    model.train()
    done = 0
    while done < steps:
        for host in loader:
            inputs = {name: value.to(device(dry), non_blocking=True) for name, value in host.items()}
            with torch.autocast(device(dry).type, torch.bfloat16):
                loss = model(**inputs).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield loss.detach()
            done += 1
            if done == steps:
                return


class Windows:
    """Seconds of `count` windows of `steps` steps after a warm-up; the GPU is waited for between windows only."""

    def __init__(self, *, warm_up: int, steps: int, count: int, dry: bool) -> None:
        self.total = warm_up + steps * count
        self.seconds: list[float] = []
        self._warm_up, self._steps, self._dry = warm_up, steps, dry
        self._done = 0
        self._begun = 0.0

    def step(self, **_: Any) -> None:
        """Note the end of a step."""
        self._done += 1
        if self._done < self._warm_up or (self._done - self._warm_up) % self._steps:
            return
        synchronize(self._dry)
        now = time.perf_counter()
        if self._done > self._warm_up:
            self.seconds.append(now - self._begun)
        elif not self._dry:
            torch.cuda.reset_peak_memory_stats()
        self._begun = now
