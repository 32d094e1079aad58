"""Training on one process: its length, order and optimizer; the best model, stop requests, files, counters."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.support.optimizers import ScheduleFree
from tests.support.toys import Augmented, Classifier, Stream, TokenModel, classification_rows, token_rows
from tests.support.training import (
    LOGGED,
    At,
    Note,
    StopAt,
    assert_equal,
    final_state,
    logged,
    losses,
    measured,
    note_heads,
    preempted_at,
    trained,
    trainer,
)
from trainer_lib import EarlyStoppingCallback, Trainer, set_seed
from trainer_lib.errors import ConfigError, Preempted
from trainer_lib.storage import Store

ROWS = classification_rows(10)
#: What a training comes to -> the most frames and files between `Trainer.train` and it; measured plus two.
DEPTHS = {"forward": (14, 6), "optimizer": (13, 6), "log": (15, 8), "commit": (28, 11)}


# -------------------------------------------------------------------------------------------------------------- length
@pytest.mark.parametrize(
    ("given", "steps", "epoch"),
    [
        ({"num_train_epochs": 2}, 6, 2.0),
        ({"num_train_epochs": 0.5}, 2, 2 / 3),
        ({"max_steps": 4}, 4, 4 / 3),
        ({"gradient_accumulation_steps": 2, "num_train_epochs": 3}, 6, 3.0),
        ({"dataloader_drop_last": True, "num_train_epochs": 2}, 4, 2.0),
        ({"global_batch_size": 3, "num_train_epochs": 1}, 4, 1.0),
        ({"global_batch_size": 10, "per_device_train_batch_size": 3, "num_train_epochs": 2}, 2, 2.0),
    ],
)
def test_length(given: dict[str, Any], steps: int, epoch: float, tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, **given)
    found: Any = (one.train().global_step, one.state.global_step, one.state.max_steps, one.state.epoch)
    assert found == (steps, steps, steps, pytest.approx(epoch))


@pytest.mark.parametrize("loader", ["ours", "the user's"])
def test_the_epoch_of_a_stream_without_a_length_is_the_number_of_passes(loader: str, tmp_path: Path) -> None:
    """Ten rows in steps of four. The first pass has no known length: `max_steps` stands in for it."""

    class Loading(Trainer):
        def get_train_dataloader(self) -> Any:
            ours = super().get_train_dataloader()
            return ours if loader == "ours" else DataLoader(Stream(ROWS), batch_size=4)

    ends = Note("on_epoch_end", lambda state, **_: state.epoch)
    given: dict[str, Any] = {**LOGGED, "save_strategy": "steps", "save_steps": 4, "max_steps": 11}

    def make(folder: str, *callbacks: Any) -> Trainer:
        return trainer(tmp_path / folder, Stream(ROWS), cls=Loading, callbacks=list(callbacks), **given)

    whole = make("whole", ends)
    whole.train()
    assert ends.kept == [1, 2, 3, pytest.approx(3 + 2 / 3)]
    epochs = [entry["epoch"] for entry in whole.state.log_history if "loss" in entry]
    assert epochs[3:] == pytest.approx([1 + 1 / 3, 1 + 2 / 3, 2, 2 + 1 / 3, 2 + 2 / 3, 3, 3 + 1 / 3, 3 + 2 / 3])
    assert epochs[:3] == sorted(epochs[:3]) and epochs[2] < 1
    resumed = make("resumed")
    resumed.train(str(tmp_path / "whole" / "checkpoint-4"))
    assert [entry["epoch"] for entry in resumed.state.log_history if "loss" in entry] == epochs


def test_every_sample_is_read_once_per_epoch_in_another_order(tmp_path: Path) -> None:
    data = Augmented(ROWS)
    trainer(tmp_path, data, num_train_epochs=2, gradient_accumulation_steps=2).train()
    assert sorted(data.read[:10]) == sorted(data.read[10:]) == list(range(10)) and data.read[:10] != data.read[10:]
    again = Augmented(ROWS)
    trainer(tmp_path, again, num_train_epochs=1, dataloader_num_workers=0, data_seed=42).train()
    assert again.read == data.read[:10]
    other = Augmented(ROWS)
    trainer(tmp_path, other, num_train_epochs=1, data_seed=1).train()
    assert other.read != again.read


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)])
def test_what_is_logged(rate: Any, tmp_path: Path) -> None:
    own = (torch.optim.AdamW, {"lr": rate})
    given: dict[str, Any] = {"lr_scheduler_type": "linear", "optimizer_cls_and_kwargs": own, **LOGGED}
    one = trainer(tmp_path, ROWS, num_train_epochs=1, **given)
    output = one.train()
    *steps, last = logged(one)
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert steps[0].keys() == {"loss", "grad_norm", "learning_rate", "epoch", "step"}
    assert [entry["learning_rate"] for entry in steps] == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
    assert last["train_loss"] == output.training_loss == pytest.approx(np.mean([entry["loss"] for entry in steps]))
    sparse = trained(tmp_path, ROWS, num_train_epochs=1, logging_strategy="steps", logging_steps=3)
    assert sparse.state.log_history[0]["loss"] == pytest.approx(np.mean([entry["loss"] for entry in steps]))


def test_clipping_limits_the_norm_and_logs_it_before(tmp_path: Path) -> None:
    def norm(state: Any, model: torch.nn.Module, **_: Any) -> float:
        return float(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).norm())

    norms = Note("on_pre_optimizer_step", norm)
    for limit in (0.01, 0.0):
        one = trained(tmp_path, ROWS, max_steps=1, callbacks=[norms], max_grad_norm=limit, **LOGGED)
    assert norms.kept[0] == pytest.approx(0.01, rel=1e-3)
    assert norms.kept[1] == pytest.approx(one.state.log_history[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("given", [{"bf16": True}, {"fp16": True}])
def test_it_learns(given: dict[str, Any], tmp_path: Path) -> None:
    rows = classification_rows(64)
    one = trained(tmp_path, rows, num_train_epochs=6, learning_rate=0.1, logging_strategy="epoch", **given)
    assert losses(one)[-1] < 0.6 * losses(one)[0]


def test_few_frames_and_files_are_between_train_and_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in a traceback or a debugger; a wrapper that only forwards is one more."""
    seen: dict[str, tuple[int, int]] = {}

    def note(name: str) -> None:
        names = [frame.filename for frame in traceback.extract_stack() if "/trainer_lib/" in frame.filename]
        seen.setdefault(name, (len(names), len(set(names))))

    class Model(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            note("forward")
            return super().forward(x, labels)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            note("optimizer")
            return super().step(closure)

    def opened(path: Any, *given: Any, **more: Any) -> int:
        if "COMMIT" in str(path) and any(frame.name == "save_checkpoint" for frame in traceback.extract_stack()):
            note("commit")
        return real(path, *given, **more)

    real = os.open
    monkeypatch.setattr(os, "open", opened)
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, **LOGGED}
    log = Note("on_log", lambda state, **_: note("log"))
    given |= {"optimizer_cls_and_kwargs": (Optimizer, {"lr": 0.1}), "callbacks": [log]}
    trained(tmp_path, ROWS, model=Model(), **given)
    assert seen.keys() == DEPTHS.keys()
    assert not {name: depth for name, depth in seen.items() if any(map(int.__gt__, depth, DEPTHS[name]))}


# ------------------------------------------------------------------------------------------------------ the optimizer
def test_what_can_be_asked_about_the_optimizer(tmp_path: Path) -> None:
    one = trainer(tmp_path, ROWS, weight_decay=0.1)
    with pytest.raises(ConfigError, match="The optimizer does not exist yet"):
        one.get_learning_rates()
    one.create_optimizer_and_scheduler(10)
    assert one.get_learning_rates() == [0.01, 0.01] and one.get_optimizer_group("body.weight")["weight_decay"] == 0.1
    assert one.get_optimizer_group(one.model.norm.weight)["weight_decay"] == 0.0  # type: ignore[union-attr,arg-type]
    assert len(one.get_optimizer_group()) == 2
    with pytest.raises(ConfigError, match="param = other: The optimizer does not hold the parameter"):
        one.get_optimizer_group("other")
    assert one.get_num_trainable_parameters() == sum(p.numel() for p in one.model.parameters())
    assert one.get_decay_parameter_names(one.model) == ["body.weight", "head.weight"]


def test_a_schedule_that_follows_a_metric_steps_after_evaluations(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_steps": 1, "max_steps": 3, **measured(1.0, 1.0, 1.0), **LOGGED}
    plateau: dict[str, Any] = {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}}
    one = trained(tmp_path, ROWS, lr_scheduler_type="reduce_lr_on_plateau", **plateau, **given)
    rates = [entry["learning_rate"] for entry in one.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.01, 0.01, 0.005])


def test_training_twice_trains_again_from_the_weights_there_are(tmp_path: Path) -> None:
    one = trained(tmp_path, ROWS, max_steps=2, save_strategy="steps", save_steps=1)
    first = one.model.head.weight.detach().clone()  # type: ignore[operator,union-attr]
    one.train()
    assert one.state.global_step == 2
    assert not torch.equal(first, one.model.head.weight)  # type: ignore[arg-type,union-attr]
    assert one.get_learning_rates() == [0.0, 0.0]


# -------------------------------------------------------------------------------------------------- best, early, limit
def test_the_best_model_is_kept_found_and_put_back(tmp_path: Path) -> None:
    heads = note_heads()
    given: dict[str, Any] = {"eval_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True, "max_steps": 9}
    given |= {"save_strategy": "steps", "save_steps": 1, **measured(0.5, 0.9, 0.7, 0.6)}
    one = trained(tmp_path, ROWS, callbacks=[heads, EarlyStoppingCallback(2)], **given)
    assert one.state.global_step == 4 and (one.state.best_metric, one.state.best_global_step) == (0.9, 2)
    assert one.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert torch.equal(one.model.state_dict()["head.weight"], heads.kept[1])
    # While it trains, the newest one stays beside the best; after the end a limit of one is one.
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert json.loads((tmp_path / "checkpoint-2" / "COMMIT.json").read_text())["meta"]["global_samples"] == 8


@pytest.mark.parametrize("best", [True, False])
def test_an_optimizer_with_two_sets_of_weights_saves_and_leaves_what_it_evaluated(best: bool, tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": ROWS, "save_steps": 1}
    given |= {"optimizer_cls_and_kwargs": (ScheduleFree, {"lr": 3.0}), "lr_scheduler_type": "constant"}
    one = trained(tmp_path, ROWS, max_steps=3, save_strategy="steps", load_best_model_at_end=best, **given)
    evaluated = [entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry]
    chosen = one.state.best_global_step or 3
    assert (chosen < 3) == best  # the last weights are not the best
    other = Classifier()
    other.load_state_dict(load((tmp_path / f"checkpoint-{chosen}" / "model.safetensors").read_bytes()))
    for each in (trainer(tmp_path, ROWS, model=other), trainer(tmp_path, ROWS, model=one.model), one):
        assert each.evaluate(ROWS)["eval_loss"] == evaluated[chosen - 1]


class Evaluating(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.evaluate()
        return super().training_step(*args, **kwargs)


def test_such_an_optimizer_of_the_users_trains_on_after_evaluations_and_resumes(tmp_path: Path) -> None:
    def make(folder: str, steps: int) -> Trainer:
        torch.manual_seed(0)
        model = Classifier()
        optimizer = ScheduleFree(model.parameters(), lr=1.0)
        given: Any = {"optimizers": (optimizer, LambdaLR(optimizer, lambda _: 1.0)), "eval_dataset": ROWS}
        given |= {"save_strategy": "steps", "save_steps": 2, "max_steps": steps}
        return trainer(tmp_path / folder, ROWS, model=model, cls=Evaluating, **given)

    whole = make("whole", 4)
    whole.train()
    stopped = make("stopped", 2)
    stopped.train()
    stopped.args.max_steps = 4
    stopped.train(resume_from_checkpoint=True)
    assert_equal(final_state(stopped), final_state(whole))


@pytest.mark.parametrize("how", ["removed", "cut short", "other bytes", "removed, then resumed"])
def test_without_the_best_one_the_last_weights_stay(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lose() -> None:
        best = tmp_path / "checkpoint-2"
        weights = best / "model.safetensors"
        if how == "cut short":
            os.truncate(weights, 9)
        elif how == "other bytes":
            weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0B")
        else:
            best.rename(tmp_path / "elsewhere")

    def make(*callbacks: Any) -> Trainer:
        given: dict[str, Any] = {"eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
        given |= {"load_best_model_at_end": True, **measured(0.9, 0.7, 0.5, 0.4)}
        return trainer(tmp_path, ROWS, callbacks=[heads, *callbacks], **given)

    heads = note_heads()
    if how == "removed, then resumed":
        assert preempted_at(make(At(5, lose), StopAt(5))) == 5
    one = make() if how == "removed, then resumed" else make(At(5, lose))
    one.train(resume_from_checkpoint="auto")
    assert torch.equal(one.model.head.weight, heads.kept[-1])  # type: ignore[union-attr,arg-type]
    assert (one.state.global_step, one.state.best_global_step, one.state.best_model_checkpoint) == (6, 2, None)
    assert re.search(r"The best checkpoint, .*checkpoint-2 \(0.9\), cannot be loaded: .* keeps its last", caplog.text)


def test_saving_only_what_is_best(tmp_path: Path) -> None:
    given: dict[str, Any] = {**measured(3.0, 5.0, 2.0), "greater_is_better": False, "eval_strategy": "epoch"}
    trained(tmp_path, ROWS, save_strategy="best", num_train_epochs=3, **given)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-9"]


# ------------------------------------------------------------------------------------------------------------ stopping
def send(number: int, times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_at_a_step_boundary_and_handlers_are_put_back(number: int, tmp_path: Path) -> None:
    stop = Note("on_step_begin", lambda state, **_: send(number, int(state.global_step == 1)))
    handler = signal.getsignal(number)
    one = trainer(tmp_path, ROWS, callbacks=[stop], max_steps=5)
    with pytest.raises(Preempted, match="Stopped on request at step 2") as stopped:
        one.train()
    assert stopped.value.step == 2
    assert signal.getsignal(number) is handler
    assert (tmp_path / "checkpoint-2" / "COMMIT.json").exists()


def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    def twice(number: int) -> Note:
        return Note("on_step_begin", lambda state, **_: send(number, 2))

    assert preempted_at(trainer(tmp_path / "a", ROWS, callbacks=[twice(signal.SIGTERM)], max_steps=5)) == 1
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "b", ROWS, callbacks=[twice(signal.SIGINT)], max_steps=5).train()
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
    folder = url if "://" in url else str(tmp_path / url)
    one = trained(tmp_path, ROWS, model=Configured(), processing_class=Tokenizer(), max_steps=1)
    one.save_model(folder)
    store = Store.open(folder)
    names = ["config.json", "model.safetensors", "tokenizer.json", "training_args.json"]
    assert [info.path for info in store.list()] == names
    weights = load(store.read_bytes("model.safetensors"))
    assert all(torch.equal(weights[name], value) for name, value in one.model.state_dict().items())
    assert json.loads(store.read_bytes("config.json"))["model_type"] == "toy"
    assert json.loads(store.read_bytes("training_args.json"))["max_steps"] == 1
    store.delete_tree()


def test_metrics_and_state_are_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = trainer(tmp_path, ROWS, max_steps=1)
    output = one.train()
    one.save_metrics("train", output.metrics)
    one.save_metrics("eval", {"eval_loss": float("nan"), "f1": torch.tensor([0.5])})  # type: ignore[dict-item]
    one.log({"own": torch.tensor(0.5, requires_grad=True), "n": np.int64(3), "each": torch.ones(2)})  # type: ignore[dict-item]
    one.save_state()
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert results == {**results, **output.metrics, "eval_loss": "nan", "f1": 0.5}
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] == 1
    assert {"own": 0.5, "n": 3, "each": [1, 1]}.items() <= state["log_history"][-1].items()
    shown = {"train_mem_cpu_alloc_delta": 3 << 20, "train_runtime": 3725.5, "total_flos": 5 << 30, "loss": 0.123456}
    assert list(one.metrics_format(shown).values()) == ["3MB", "1:02:05.50", "5GF", 0.1235]
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
    given |= {"save_strategy": "steps", "save_steps": 1}
    one = trainer(tmp_path, token_rows(10), model=Costly(), num_train_epochs=1, **given, **LOGGED)
    output = one.train()
    rates = [output.metrics[f"train_{what}_per_second"] for what in ("samples", "tokens")]
    assert rates[1] == pytest.approx(7 * rates[0], rel=0.01)  # ten samples of seven tokens, the ragged batch included
    assert one.state.num_input_tokens_seen == 70
    assert output.metrics["total_flos"] == one.state.total_flos == 10_000
    assert json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["total_flos"] == 4000
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


def test_old_names_of_the_constructor(tmp_path: Path) -> None:
    tokenizer = Tokenizer()
    with pytest.warns(DeprecationWarning, match="`tokenizer` is the old name of `processing_class`"):
        one = Trainer(Classifier(), trainer(tmp_path, ROWS).args, tokenizer=tokenizer)
    assert one.processing_class is one.tokenizer is tokenizer


def test_seeds() -> None:
    set_seed(5)
    drawn = (torch.rand(1).item(), float(np.random.rand()))
    set_seed(5)
    assert (torch.rand(1).item(), float(np.random.rand())) == drawn
