"""Stopped and resumed equals uninterrupted, bit for bit: what data, models, optimizers and schedules keep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.support.optimizers import Lookahead, ScheduleFree
from tests.support.resuming import prove
from tests.support.seq2seq import Copier, Tokens, seq2seq_trainer
from tests.support.seq2seq import rows as sequences
from tests.support.tiny_models import bert, llama, lm_rows, text_rows, tokenizer
from tests.support.toys import (
    Augmented,
    Classifier,
    StatefulStream,
    Stream,
    TokenModel,
    classification_rows,
    token_rows,
)
from tests.support.training import TWICE, StopAt, preempted_at, trainer
from trainer_lib import DataCollatorForLanguageModeling, ExportableState, Trainer, TrainerCallback
from trainer_lib.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
ROWS = classification_rows(22)
COSINE: dict[str, Any] = {**TWICE, "lr_scheduler_type": "cosine"}
TWO: dict[str, Any] = {"dataloader_num_workers": 2}
PERSISTENT: dict[str, Any] = {**TWO, "dataloader_persistent_workers": True}
Case = dict[str, Any]


def maker(case: Case) -> Callable[..., Trainer]:
    """Build a Trainer of a case: "model" and "rows" are called for each, the rest are its arguments."""
    settings = {**TWICE, **case}
    build, rows = settings.pop("model", Classifier), settings.pop("rows", lambda: ROWS)
    make_trainer = settings.pop("trainer", trainer)

    def make(folder: Path, *callbacks: TrainerCallback) -> Trainer:
        torch.manual_seed(0)
        made: Trainer = make_trainer(folder, rows(), model=build(), callbacks=list(callbacks), **settings)
        return made

    return make


class Known(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class Seeded(IterableDataset[dict[str, Any]]):
    """Shuffles with a generator of its own, which the Trainer re-seeds for each epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (ROWS[index] for index in torch.randperm(len(ROWS), generator=self.generator).tolist())


def lengths() -> list[dict[str, Any]]:
    return [{**row, "length": 1 + index % 7} for index, row in enumerate(token_rows(22))]


def order(strategy: str, **more: Any) -> Case:
    return {"rows": lengths, "model": TokenModel, "train_sampling_strategy": strategy, "data_seed": 5, **more}


def masked(**more: Any) -> Case:
    words = tokenizer()
    words.add_special_tokens({"mask_token": "[MASK]"})
    rows = [{"input_ids": row["input_ids"].tolist()} for row in token_rows(22)]
    collate = DataCollatorForLanguageModeling(words, mlm_probability=0.4, mlm=True)
    return {"rows": lambda: rows, "model": lambda: bert(cls="BertForMaskedLM"), "data_collator": collate, **more}


def sortish_trainer(folder: Path, rows: Any, *, model: Any, callbacks: list[Any], **settings: Any) -> Any:
    made = seq2seq_trainer(folder, model, train_dataset=rows, processing_class=Tokens(), **settings)
    for callback in callbacks:
        made.add_callback(callback)
    return made


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(Augmented(ROWS), batch_size=4, shuffle=True, num_workers=self.args.dataloader_num_workers)


class OneGenerator(Trainer):
    """Gives loaders that share a generator, as torch's notes on reproducibility do."""

    def get_train_dataloader(self) -> Any:
        self.shared = torch.Generator().manual_seed(3)
        return DataLoader(ROWS, batch_size=4, shuffle=True, generator=self.shared)  # type: ignore[arg-type]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(ROWS, batch_size=4, generator=self.shared)  # type: ignore[arg-type]


DATA: dict[str, tuple[Case, int]] = {
    "augmentation in workers": ({"rows": lambda: Augmented(ROWS), **TWO}, 2),
    "augmentation in persistent workers": ({"rows": lambda: Augmented(ROWS), **PERSISTENT}, 4),
    "sequential": (order("sequential"), 3),
    "random, last batch dropped": (order("random", dataloader_drop_last=True), 3),
    "grouped by length": (order("group_by_length"), 3),
    "grouped by length, last batch dropped": (order("group_by_length", dataloader_drop_last=True), 3),
    "sorted in shuffled batches": (
        {"rows": lambda: sequences(22), "model": Copier, "trainer": sortish_trainer, "sortish_sampler": True,
         "save_strategy": "no"}, 4),
    "masks": (masked(), 4),
    "masks in workers": (masked(**TWO), 4),
    "a stream with a length": ({"rows": lambda: Known(ROWS), "max_steps": 8}, 4),
    "a stream with a length in workers": ({"rows": lambda: Known(ROWS), "max_steps": 8, **TWO}, 4),
    "a stream with a generator": ({"rows": Seeded, "max_steps": 8}, 4),
    "a stream with a generator in workers": ({"rows": Seeded, "max_steps": 8, **PERSISTENT}, 4),
    "a stream with a state in workers": ({"rows": lambda: StatefulStream(ROWS), "max_steps": 8, **TWO}, 4),
    "a stream with a state in persistent workers": (
        {"rows": lambda: StatefulStream(ROWS), "max_steps": 8, **PERSISTENT}, 4),
    # Two workers read a stream each: 44 samples an epoch, six steps.
    "a stream in workers": ({"rows": lambda: Stream(ROWS), "max_steps": 14, **TWO}, 8),
    "a stream in persistent workers": ({"rows": lambda: Stream(ROWS), "max_steps": 14, **PERSISTENT}, 8),
    "an own loader": ({"cls": OwnLoader}, 2),
    "own loaders with one generator": (
        {"cls": OneGenerator, "eval_dataset": ROWS, "eval_strategy": "steps", "eval_steps": 1}, 2),
    "an own loader with workers": ({"cls": OwnLoader, **TWO}, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_data_come_as_if_nothing_had_stopped(name: str, tmp_path: Path) -> None:
    case, stop = DATA[name]
    prove(maker(case), tmp_path, stop)


def _streamed(*, shuffled: bool) -> Any:
    import datasets

    table = datasets.Dataset.from_dict({"x": [row["x"].tolist() for row in ROWS], "labels": [0, 1] * 11})
    stream = table.to_iterable_dataset(num_shards=2).with_format("torch")
    return stream.shuffle(seed=3, buffer_size=9) if shuffled else stream


@pytest.mark.parametrize(("shuffled", "stop"), [(False, 4), (True, 2), (True, 4)])
def test_streams_of_datasets(shuffled: bool, stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their shuffle buffer is not part of their state: such a stream is read from its start, and a warning says so."""
    with caplog.at_level(logging.WARNING, logger="trainer_lib"):
        prove(maker({"rows": lambda: _streamed(shuffled=shuffled), "max_steps": 6}), tmp_path, stop)
    assert ("leaves out what its shuffle buffer holds" in caplog.text) == shuffled


def test_another_number_of_workers_reads_another_stream(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**TWICE, "max_steps": 9}
    preempted_at(trainer(tmp_path, Stream(ROWS), callbacks=[StopAt(2)], **settings))
    with pytest.raises(ConfigError, match="dataloader_num_workers = 2: The value was 0 when the checkpoint was"):
        trainer(tmp_path, Stream(ROWS), dataloader_num_workers=2, **settings).train(True)


class Normed(nn.Module):
    """BatchNorm keeps a mean, a variance and a count of batches; a counter of our own is an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += len(x)
        logits = self.head(torch.relu(self.norm(self.body(x)))) * (1 + self.seen * 1e-3)
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


def transposed() -> nn.Module:
    """A classifier whose weights lie column by column in memory."""
    model = Classifier()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
    return model


class Recurrent(nn.Module):
    """Adds what it remembers of the batch before: `past_index` hands it back, as a tensor or nested."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.layer, self.nested = nn.Linear(6, 3), nested

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, mems: Any = None) -> dict[str, Any]:
        past = mems[1]["last"][0] if self.nested and mems is not None else mems
        logits = self.layer(x) + (0 if past is None else 0.5 * past)
        memory: Any = logits.mean(0)
        if self.nested:
            memory = (torch.arange(3), {"last": [memory, None]})
        out = {"logits": logits, "memory": memory}
        return out if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **out}


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    base = llama()
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def own_optimizer(folder: Path, rows: Any, *, model: Any, **settings: Any) -> Trainer:
    """With an optimizer and a schedule that the user built."""
    groups: list[dict[str, Any]] = [{"params": list(model.body.parameters()), "lr": 0.1}]
    groups += [{"params": list(model.norm.parameters())}]
    groups += [{"params": list(model.head.parameters()), "betas": (0.8, 0.9)}]
    optimizer = torch.optim.Adam(groups, 0.01)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    then = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], [3])
    return trainer(folder, rows, model=model, optimizers=(optimizer, schedule), **settings)


def tensor_rate(folder: Path, rows: Any, *, model: Any, **settings: Any) -> Trainer:
    """With an optimizer whose learning rate is a tensor, as that of torchao is."""
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    return trainer(folder, rows, model=model, optimizers=(optimizer, None), **settings)


def half_rows() -> list[dict[str, Any]]:
    return [{**row, "x": row["x"].to(torch.bfloat16)} for row in ROWS]


EVALUATED: Case = {"eval_strategy": "steps", "eval_dataset": ROWS[:7]}
FREE: Case = {"lr_scheduler_type": "constant", "optimizer_cls_and_kwargs": (ScheduleFree, {"lr": 0.05}), **EVALUATED}
SCHEDULES: dict[str, Case] = {
    "reduce_lr_on_plateau": {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}},
    "greedy": {},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 2}, "warmup_steps": 1},
    "inverse_sqrt": {"warmup_steps": 2},
}
STATES: dict[str, tuple[Case, int]] = {
    "batch norm": ({"model": Normed}, 2),
    "weights by column": ({"model": transposed}, 3),
    "memory": ({"model": lambda: Recurrent(nested=False), "past_index": 2}, 3),  # at the end of an epoch
    "nested memory": ({"model": lambda: Recurrent(nested=True), "past_index": 2}, 2),
    "label smoothing": ({"label_smoothing_factor": 0.1}, 2),
    "no clipping": ({"max_grad_norm": 0.0}, 3),
    "weights in bf16": ({"model": lambda: Classifier().to(torch.bfloat16), "rows": half_rows}, 3),
    "noise on embeddings": ({"model": TokenModel, "rows": lambda: token_rows(22), "neftune_noise_alpha": 5.0}, 4),
    "bert with dropout": ({"model": lambda: bert(hidden_dropout_prob=0.2), "rows": lambda: text_rows(12)}, 3),
    "llama, recomputed": (
        {"model": lambda: llama(attention_dropout=0.2), "rows": lambda: lm_rows(12), "gradient_checkpointing": True},
        3,
    ),
    "llama in bf16": ({"model": lambda: llama(attention_dropout=0.2), "rows": lambda: lm_rows(12), "bf16": True}, 3),
    "adapters with dropout": ({"model": adapted, "rows": lambda: lm_rows(12)}, 3),
    "adafactor": ({"optim": "adafactor"}, 3),
    "muon": ({"optim": "muon"}, 3),
    "lookahead": ({"optimizer_cls_and_kwargs": (Lookahead, {})}, 3),
    "an optimizer with two sets of weights": ({**FREE, "eval_steps": 2}, 2),
    "an optimizer with two sets of weights, after an evaluation": ({**FREE, "eval_steps": 2}, 3),
    "an own optimizer and schedule": ({"trainer": own_optimizer}, 2),
    "a learning rate that is a tensor": ({"trainer": tensor_rate}, 2),
    "a learning rate that is a tensor, saved in the background": ({"trainer": tensor_rate, "save_async": True}, 4),
    **{
        name: ({"lr_scheduler_type": name, "learning_rate": 0.3, "metric_for_best_model": "loss", "eval_steps": 1,
                **EVALUATED, **more}, 3)
        for name, more in SCHEDULES.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_what_models_optimizers_and_schedules_keep_comes_back(name: str, tmp_path: Path) -> None:
    case, stop = STATES[name]
    prove(maker({"lr_scheduler_type": "cosine", **case}), tmp_path, stop)


class Average(TrainerCallback, ExportableState):
    """A moving average of the weights, as tensors; and what JSON has no word for."""

    def __init__(self, decay: float = 0.5) -> None:
        self.decay = decay
        self.shadow: dict[str, torch.Tensor] = {}
        self.last: tuple[int, torch.Tensor] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, value in kwargs["model"].named_parameters():
            kept = self.shadow.setdefault(name, value.detach().clone())
            kept.lerp_(value.detach(), 1 - self.decay)
        self.last = (state.global_step, torch.tensor(state.global_step, dtype=torch.int16))

    def state(self) -> dict[str, Any]:
        return {"args": {"decay": self.decay}, "attributes": {"shadow": self.shadow, "last": self.last}}


@pytest.mark.parametrize("settings", [{"save_async": True}, {"restore_callback_states_from_checkpoint": True}])
def test_an_average_of_the_weights_in_a_callback(settings: dict[str, Any], tmp_path: Path) -> None:
    def make(folder: Path, *callbacks: Any) -> Trainer:
        return trainer(folder, ROWS, callbacks=[Average(), *callbacks], **{**COSINE, "save_steps": 1, **settings})

    averages = [made.pop_callback(Average) for made in prove(make, tmp_path, 3)]
    ours, theirs = (average.shadow for average in averages if isinstance(average, Average))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    expected = (6, torch.tensor(6, dtype=torch.int16))
    assert [average.last for average in averages if isinstance(average, Average)] == [expected] * 2


def test_memory_of_other_batches_is_not_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(**settings: Any) -> Trainer:
        torch.manual_seed(0)
        settings = {"num_train_epochs": 2, "global_batch_size": 8, "past_index": 2, **settings}
        return trainer(tmp_path, ROWS, model=Recurrent(nested=False), **settings)

    assert preempted_at(make(callbacks=[StopAt(2)])) == 2
    make(per_device_train_batch_size=8).train(True)
    assert "belongs to batches of another size: training starts without it" in caplog.text


def test_memory_that_cannot_be_saved_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Recurrent):
        def forward(self, x: torch.Tensor, labels: Any = None, mems: Any = None) -> dict[str, Any]:
            return {**super().forward(x, labels), "memory": object()}

    trainer(
        tmp_path, ROWS, model=Odd(nested=False), past_index=2, save_strategy="steps", save_steps=2, max_steps=2
    ).train()
    assert "The memory of past_index is not saved" in caplog.text
