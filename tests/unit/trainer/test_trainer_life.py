"""The life of a run: the best model, stop requests, files, counters, loaders of one's own."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.toys import Augmented, Classifier, TokenModel, classification_rows, token_rows
from tests.support.training import StopAt, note_heads, preempted_at, trainer
from trainer_lib import EarlyStoppingCallback, Trainer, TrainerCallback, enable_full_determinism, set_seed
from trainer_lib.errors import ConfigError, Preempted

ROWS = classification_rows(10)
EVERY_STEP: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1}


# -------------------------------------------------------------------------------------------------- best, early, limit
def test_the_best_model_is_kept_found_and_put_back(tmp_path: Path) -> None:
    values = iter([0.5, 0.9, 0.7, 0.6])
    heads = note_heads()
    one = trainer(
        tmp_path,
        ROWS,
        eval_dataset=ROWS,
        compute_metrics=lambda p: {"accuracy": next(values)},
        callbacks=[heads, EarlyStoppingCallback(2)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        max_steps=9,
    )
    one.train()
    assert one.state.global_step == 4
    assert (one.state.best_metric, one.state.best_global_step) == (0.9, 2)
    assert one.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert torch.equal(one.model.state_dict()["head.weight"], heads.kept[1])
    # While it trains, the newest one stays beside the best; after the end a limit of one is one.
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert json.loads((tmp_path / "checkpoint-2" / "COMMIT.json").read_text())["meta"]["global_samples"] == 8


@pytest.mark.parametrize("how", ["removed", "cut short", "removed, then resumed"])
def test_without_the_best_checkpoint_training_ends_with_its_last_weights(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Lose(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                best = tmp_path / "checkpoint-2"
                best.rename(tmp_path / "elsewhere") if how != "cut short" else os.truncate(
                    best / "model.safetensors", 9
                )

    def make(*callbacks: Any) -> Trainer:
        values = iter([0.9, 0.7, 0.5, 0.4])
        given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        given |= {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "max_steps": 6}
        metrics: dict[str, Any] = {"eval_dataset": ROWS, "compute_metrics": lambda p: {"accuracy": next(values)}}
        return trainer(tmp_path, ROWS, callbacks=[heads, *callbacks], **given, **metrics)

    heads = note_heads()
    if how == "removed, then resumed":
        assert preempted_at(make(Lose(), StopAt(5))) == 5
    one = make() if how == "removed, then resumed" else make(Lose())
    one.train(resume_from_checkpoint="auto")
    assert torch.equal(one.model.head.weight, heads.kept[-1])  # type: ignore[union-attr,arg-type]
    assert (one.state.global_step, one.state.best_global_step, one.state.best_model_checkpoint) == (6, 2, None)
    assert re.search(r"The best checkpoint, .*checkpoint-2 \(0.9\), cannot be loaded: .* keeps its last", caplog.text)


def test_saving_only_what_is_best(tmp_path: Path) -> None:
    values = iter([3.0, 5.0, 2.0])
    one = trainer(
        tmp_path,
        ROWS,
        eval_dataset=ROWS,
        compute_metrics=lambda p: {"error": next(values)},
        metric_for_best_model="error",
        greater_is_better=False,
        eval_strategy="epoch",
        save_strategy="best",
        num_train_epochs=3,
    )
    one.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-9"]


# ------------------------------------------------------------------------------------------------------------ stopping
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_at_a_step_boundary_and_handlers_are_put_back(number: int, tmp_path: Path) -> None:
    class Signal(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    one = trainer(tmp_path, ROWS, callbacks=[Signal()], max_steps=5)
    with pytest.raises(Preempted, match="Stopped on request at step 2") as stopped:
        one.train()
    assert stopped.value.step == 2
    assert signal.getsignal(number) is handler
    assert (tmp_path / "checkpoint-2" / "COMMIT.json").exists()


def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    class Twice(TrainerCallback):
        def __init__(self, number: int) -> None:
            self.number = number

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), self.number)
            os.kill(os.getpid(), self.number)

    assert preempted_at(trainer(tmp_path / "a", ROWS, callbacks=[Twice(signal.SIGTERM)], max_steps=5)) == 1
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "b", ROWS, callbacks=[Twice(signal.SIGINT)], max_steps=5).train()
    assert not list((tmp_path / "b").glob("checkpoint-*"))


def test_sigterm_may_be_left_to_the_program(tmp_path: Path) -> None:
    seen: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        trainer(tmp_path, ROWS, callbacks=[StopAt(1)], enable_jit_checkpoint=False, max_steps=2).train()
    finally:
        signal.signal(signal.SIGTERM, old)
    assert seen == [signal.SIGTERM]


# ----------------------------------------------------------------------------------------------------- files and shows
class Configured(Classifier):
    config = {"features": 6, "model_type": "toy"}  # noqa: RUF012


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("url", ["memory://exports/one", "model"])
def test_the_exported_model_loads_elsewhere(url: str, tmp_path: Path) -> None:
    from safetensors.torch import load

    from trainer_lib.storage import Store

    folder = url if "://" in url else str(tmp_path / url)
    one = trainer(tmp_path, ROWS, model=Configured(), processing_class=Tokenizer(), max_steps=1)
    one.train()
    one.save_model(folder)
    store = Store.open(folder)
    names = ["config.json", "model.safetensors", "tokenizer.json", "training_args.json"]
    assert [info.path for info in store.list()] == names
    weights = load(store.read_bytes("model.safetensors"))
    for name, value in one.model.state_dict().items():
        assert torch.equal(weights[name], value)
    assert json.loads(store.read_bytes("config.json"))["model_type"] == "toy"
    assert json.loads(store.read_bytes("training_args.json"))["max_steps"] == 1
    store.delete_tree()


def test_checkpoints_go_to_any_store(tmp_path: Path) -> None:
    from trainer_lib.storage import Store

    url = "memory://runs/one"
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    stopped = trainer(url, ROWS, callbacks=[StopAt(3)], **given)
    assert preempted_at(stopped) == 3
    resumed = trainer(url, ROWS, **given)
    resumed.train(resume_from_checkpoint=True)
    whole = trainer(tmp_path, ROWS, **given)
    whole.train()
    assert torch.equal(resumed.model.state_dict()["head.weight"], whole.model.state_dict()["head.weight"])
    Store.open("memory://runs").delete_tree()


def test_metrics_and_state_are_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = trainer(tmp_path, ROWS, max_steps=1)
    output = one.train()
    one.save_metrics("train", output.metrics)
    one.save_metrics("eval", {"eval_loss": float("nan")})
    one.save_state()
    assert json.loads((tmp_path / "all_results.json").read_text()).keys() == {*output.metrics, "eval_loss"}
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 1
    shown = one.metrics_format(
        {"train_mem_cpu_alloc_delta": 3 << 20, "train_runtime": 3725.5, "total_flos": 5 << 30, "loss": 0.123456}
    )
    assert list(shown.values()) == ["3MB", "1:02:05.50", "5GF", 0.1235]
    capsys.readouterr()
    one.log_metrics("train", {"loss": 0.5, "train_runtime": 1.0})
    assert capsys.readouterr().out.splitlines() == [
        "***** train metrics *****",
        "  loss          =        0.5",
        "  train_runtime = 0:00:01.00",
    ]


def test_what_is_counted(tmp_path: Path) -> None:
    class Costly(TokenModel):
        def floating_point_ops(self, inputs: Any) -> int:
            return 1000 * len(inputs["input_ids"])

    given: dict[str, Any] = {"include_num_input_tokens_seen": "all", "include_tokens_per_second": True}
    one = trainer(tmp_path, token_rows(10), model=Costly(), num_train_epochs=1, **given, **EVERY_STEP)
    output = one.train()
    rates = [output.metrics[f"train_{what}_per_second"] for what in ("samples", "tokens")]
    assert rates[1] == pytest.approx(7 * rates[0], rel=0.01)  # ten samples of seven tokens, the ragged batch included
    assert one.state.num_input_tokens_seen == 70
    assert output.metrics["total_flos"] == one.state.total_flos == 10_000
    assert [entry["num_input_tokens_seen"] for entry in one.state.log_history] == [28, 56, 70, 70]
    for entry in one.state.log_history[:3]:  # the run so far, as the Trainer of transformers logs it
        tokens = entry["train_tokens_per_second"] * entry["train_runtime"]
        assert tokens == pytest.approx(entry["num_input_tokens_seen"], rel=0.05)
    assert one.num_tokens(one.get_train_dataloader()) == 70


def test_columns_the_model_does_not_take_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "note": "text", "extra": 1} for row in ROWS]
    with caplog.at_level(logging.INFO, logger="trainer_lib"):
        trainer(tmp_path, rows, max_steps=1).train()
    assert "does not take are dropped: extra, note" in caplog.text
    with pytest.raises(ConfigError, match="The batch has x, labels, extra; the model's forward takes x, labels"):
        trainer(tmp_path, rows, max_steps=1, remove_unused_columns=False).train()

    class Table(list[Any]):
        """Like `datasets.Dataset`, which drops columns itself."""

        column_names = ("x", "labels", "extra")

        def remove_columns(self, names: list[str]) -> Table:
            return Table({name: value for name, value in row.items() if name not in names} for row in self)

    trainer(tmp_path, Table({**row, "extra": 1} for row in ROWS), max_steps=1).train()


def test_a_loader_of_ones_own_trains(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            data: Any = ROWS
            return torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, collate_fn=self.data_collator)

    one = trainer(tmp_path, None, cls=Own, num_train_epochs=2, gradient_accumulation_steps=2)
    one.train()
    assert one.state.global_step == 6


def test_a_sampler_of_ones_own_decides_the_order(tmp_path: Path) -> None:
    class Backwards(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return list(range(len(train_dataset) - 1, -1, -1))

    data = Augmented(ROWS)
    trainer(tmp_path, data, cls=Backwards, num_train_epochs=1).train()
    assert data.read == list(range(9, -1, -1))


def test_old_names_of_the_constructor(tmp_path: Path) -> None:
    tokenizer = Tokenizer()
    with pytest.warns(DeprecationWarning, match="`tokenizer` is the old name of `processing_class`"):
        one = Trainer(Classifier(), trainer(tmp_path, ROWS).args, tokenizer=tokenizer)
    assert one.processing_class is one.tokenizer is tokenizer


def test_seeds(tmp_path: Path) -> None:
    set_seed(5)
    drawn = (torch.rand(1).item(), float(np.random.rand()))
    set_seed(5)
    assert (torch.rand(1).item(), float(np.random.rand())) == drawn
    try:
        enable_full_determinism(5)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.rand(1).item() == drawn[0]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
