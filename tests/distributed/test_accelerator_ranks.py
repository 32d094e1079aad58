"""`trainer.accelerator` on two ranks: what overrides gather, reduce, pad and prepare."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from tests.support.distributed import loaded, run_distributed
from tests.support.tiny_models import llama
from tests.support.toys import Classifier, classification_rows
from tests.support.training import trainer
from trainer_lib import Trainer
from trainer_lib.base.outputs import EvalLoopOutput
from trainer_lib.errors import ConfigError

ROWS = classification_rows(13)


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded("accelerate", "datasets", "peft", "transformers.models.llama.modeling_llama"):
        yield


def in_one_group(folder: str) -> dict[str, Any]:
    parts: tuple[Callable[[str], Any], ...] = (gathering_steps, gathering_loops, with_own_loaders, mean_losses)
    return {part.__name__: part(f"{folder}/{part.__name__}") for part in parts}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Findings of two ranks in one group: forming it takes longer than these trainings."""
    return run_distributed(in_one_group, 2, str(tmp_path_factory.mktemp("two")))


def exchanging(folder: str) -> None:
    """One call of everything that ranks do together, with values that differ between them."""
    from accelerate.state import AcceleratorState, PartialState

    training = trainer(folder, ROWS)
    helper, rank = training.accelerator, training.args.process_index
    for state in (PartialState(), AcceleratorState(), helper.state, helper):
        facts = (state.num_processes, state.process_index, state.local_process_index, str(state.device))
        assert (*facts, state.use_distributed) == (2, rank, rank, "cpu", True)
    assert str(helper.distributed_type) == "DistributedType.MULTI_CPU" and torch.get_num_threads() == 1
    mine = torch.arange(rank + 1) + 10 * rank
    gathered = helper.gather({"a": mine, "b": [torch.tensor(rank), (mine.float().bfloat16(), mine > 10)]})
    assert isinstance(gathered["b"], list) and isinstance(gathered["b"][1], tuple)
    number, (half, flags) = gathered["b"]
    assert (gathered["a"].tolist(), number.tolist(), half.tolist()) == ([0, 10, 11], [0, 1], [0.0, 10.0, 11.0])
    assert (half.dtype, flags.tolist()) == (torch.bfloat16, [False, False, True])
    texts = helper.gather_for_metrics({"id": rank, 3: ["x", (1.5, None)], "t": mine})
    assert [(text["id"], text["t"].tolist()) for text in texts] == [(0, [0]), (1, [10, 11])]
    assert [text[3] for text in texts] == [["x", (1.5, None)]] * 2
    assert helper.gather_for_metrics(["a"] * (rank + 1)) == ["a"] * 3
    objects = helper.gather_for_metrics([mine], use_gather_object=True)
    assert [value.tolist() for value in objects] == [[0], [10, 11]]
    padded = helper.pad_across_processes({"wide": torch.full((2, rank + 1), rank)}, dim=1, pad_index=-100)
    assert padded["wide"].tolist() == [[1, 1] if rank else [0, -100]] * 2
    assert helper.pad_across_processes(torch.ones(rank + 1), pad_first=True).tolist() == [float(rank), 1.0]
    assert helper.reduce(torch.tensor(rank + 1)).item() == 3
    assert helper.reduce([torch.tensor(rank + 1.0)], "mean")[0].item() == 1.5
    assert helper.reduce(torch.tensor(rank + 1), "max").item() == 2
    assert helper.reduce(torch.tensor(rank + 1), reduction="none").item() == rank + 1
    with pytest.raises(ConfigError, match="differ between the processes"):
        helper.gather(torch.zeros(2, rank + 1))
    with helper.split_between_processes(list("abc")) as share:
        assert share == (["c"] if rank else ["a", "b"])
    ran: list[int] = []
    helper.on_main_process(lambda: ran.append(0))()
    helper.on_last_process(lambda: ran.append(1))()
    helper.on_process(lambda: ran.append(2), process_index=1)()
    assert ran == ([1, 2] if rank else [0])
    with helper.main_process_first(), helper.local_main_process_first():
        helper.wait_for_everyone()
    if rank:
        helper.set_trigger()
    assert (helper.check_trigger(), helper.check_trigger()) == (True, False)


class Gathering(Trainer):
    """Gathers in its loss, as TRL's trainers do."""

    seen: dict[str, list[Any]]

    def __init__(self, *given: Any, **more: Any) -> None:
        self.seen = {"train": [], "eval": []}
        super().__init__(*given, **more)

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
        mode = "train" if model.training else "eval"
        labels = inputs["labels"]
        rows = self.accelerator.gather_for_metrics(labels)
        count = self.accelerator.gather_for_metrics(torch.tensor(len(labels)))
        self.seen[mode].append((rows.tolist(), int(count.sum())))
        return super().compute_loss(model, inputs, *given, **more)


def gathering_steps(folder: str) -> dict[str, list[Any]]:
    given: dict[str, Any] = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
    given |= {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "per_device_eval_batch_size": 4}
    one: Any = trainer(folder, ROWS, cls=Gathering, eval_dataset=ROWS, **given)
    one.train()
    one.evaluate()
    return dict(one.seen)


def test_every_sample_is_gathered_once_although_a_rank_has_dummy_batches(two: list[dict[str, Any]]) -> None:
    zero, one = (rank["gathering_steps"] for rank in two)
    assert zero == one
    labels = [int(row["labels"]) for row in ROWS]
    for mode in ("train", "eval"):
        assert sorted(label for rows, _ in zero[mode] for label in rows) == sorted(labels)
        assert sum(count for _, count in zero[mode]) == len(labels)
        assert all(len(rows) == count for rows, count in zero[mode])


class Rows(IterableDataset[dict[str, Any]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(ROWS[: self.count])


class OwnLoop(Trainer):
    """Iterates the loader by itself and gathers, as evaluations of generated text do."""

    def evaluation_loop(self, dataloader: Any, *given: Any, **more: Any) -> Any:
        labels: list[int] = []
        for batch in dataloader:
            labels += self.accelerator.gather_for_metrics(batch["labels"]).tolist()
        # After the loop, whose last batch was a dummy on one rank, nothing is left out.
        ends = self.accelerator.gather_for_metrics(torch.tensor([self.args.process_index])).tolist()
        metrics: dict[str, Any] = {"eval_labels": labels, "eval_ends": ends}
        return EvalLoopOutput(None, None, metrics, len(labels))


def gathering_loops(folder: str) -> list[list[Any]]:
    given: dict[str, Any] = {"cls": OwnLoop, "per_device_eval_batch_size": 4}
    found: list[list[Any]] = []
    for count in (4, 12):
        for workers in (0, 1):
            one = trainer(folder, ROWS, eval_dataset=Rows(count), dataloader_num_workers=workers, **given)
            found.append([one.evaluate()[f"eval_{name}"] for name in ("labels", "ends")])
    return found


def test_a_loop_of_ones_own_gathers_every_sample_of_a_stream_once(two: list[dict[str, Any]]) -> None:
    zero, one = (rank["gathering_loops"] for rank in two)
    assert zero == one
    labels = [int(row["labels"]) for row in ROWS]
    assert zero == [[labels[:count], [0, 1]] for count in (4, 4, 12, 12)]


class OwnLoaders(Trainer):
    """Prepares its loaders, as sentence-transformers' trainers do."""

    prepares = True

    def _own(self, rows: Any) -> Any:
        loader: Any = DataLoader(rows, batch_size=2)
        if self.prepares:
            loader = self.accelerator.prepare_data_loader(loader)
            assert isinstance(loader, DataLoader) and loader.dataset is rows
        return loader

    def get_train_dataloader(self) -> Any:
        self.accelerator.even_batches = False
        return self._own(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._own(eval_dataset or self.eval_dataset)


class PlainLoaders(OwnLoaders):
    prepares = False


def with_own_loaders(folder: str) -> list[Any]:
    ends = []
    for cls in (OwnLoaders, PlainLoaders):
        torch.manual_seed(0)
        one = trainer(folder, ROWS, cls=cls, model=Classifier(0.0), eval_dataset=ROWS, num_train_epochs=2)
        one.train()
        ends.append(([float(each.sum()) for each in one.model.parameters()], one.evaluate()["eval_loss"]))
    return ends


def test_a_prepared_loader_trains_as_the_plain_one_and_is_divided_once(two: list[dict[str, Any]]) -> None:
    (prepared, plain), other = (rank["with_own_loaders"] for rank in two)
    assert prepared == plain and other == [prepared, plain]


def preparing(folder: str) -> None:
    training = trainer(folder, ROWS, model=Classifier(0.0))
    helper, rank = training.accelerator, training.args.process_index
    # A loop of the caller's own over a prepared loader, as TRL's DPO computes its reference values.
    seen = []
    loader: Any = DataLoader(ROWS, batch_size=3)  # type: ignore[arg-type]
    for batch in helper.prepare(loader):
        seen += helper.gather_for_metrics((batch["labels"], batch["x"]))[0].tolist()
    assert seen == [int(row["labels"]) for row in ROWS]
    # A second model that trains, and one that does not.
    critic = nn.Linear(2, 1)
    for value in critic.parameters():
        nn.init.constant_(value, rank + 1.0)
    wrapped, optimizer = helper.prepare(critic, torch.optim.SGD(critic.parameters(), lr=1.0))
    helper.backward(wrapped(torch.full((1, 2), rank + 1.0)).sum())
    helper.clip_grad_norm_(wrapped.parameters(), 100.0)
    optimizer.step()
    # Rank 0's values, minus the mean gradient of inputs 1 and 2.
    assert [value.tolist() for value in critic.parameters()] == [[[-0.5, -0.5]], [0.0]]
    assert type(helper.prepare_model(nn.Linear(2, 1), evaluation_mode=True)) is nn.Linear
    # The Trainer's own model is wrapped once, here, and trained as that.
    replicated = helper.prepare(training.model)
    training.train()
    assert training.model_wrapped is replicated is helper.prepare(replicated)
    assert helper.prepare_model(wrapped) is wrapped
    assert type(wrapped) is type(replicated) is DistributedDataParallel
    assert helper.unwrap_model(replicated) is training.model and helper.unwrap_model(wrapped) is critic


def exchanging_and_preparing(folder: str) -> None:
    exchanging(f"{folder}/exchanging")
    preparing(f"{folder}/preparing")


def test_what_ranks_exchange_and_prepare_beside_the_trainers_own(tmp_path: Path) -> None:
    run_distributed(exchanging_and_preparing, 2, str(tmp_path))


def under_the_state_of_accelerate(folder: str) -> list[Any]:
    """What a script of transformers does beside the Trainer; accelerate has formed the process group before it."""
    from accelerate import Accelerator, PartialState
    from accelerate.logging import get_logger
    from accelerate.state import AcceleratorState
    from accelerate.utils import gather_object

    os.environ["ACCELERATE_USE_CPU"] = "true"
    state = PartialState()
    training: Any = trainer(folder, ROWS, cls=Gathering, num_train_epochs=1, per_device_train_batch_size=2)
    get_logger(__name__, log_level="INFO").info("accelerate's logger needs its state", main_process_only=True)
    training.train()
    assert isinstance(training.accelerator, Accelerator)
    with state.main_process_first():
        pass
    indices = gather_object([state.process_index])
    state.wait_for_everyone()
    torch.distributed.destroy_process_group()
    return [AcceleratorState().num_processes, indices, sum(count for _, count in training.seen["train"])]


def test_a_script_may_ask_accelerate_for_its_state_before_the_trainer(tmp_path: Path) -> None:
    assert run_distributed(under_the_state_of_accelerate, 2, str(tmp_path)) == [[2, [0, 1], 13]] * 2


class Means(Trainer):
    """Its loss is a mean over its batch and stated to be no more, as those of TRL's preference trainers."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs["logits"].sum() * 0 + sum(value.sum() for value in model.parameters())
        return (loss, outputs) if return_outputs else loss


class DividedMeans(Means):
    """The same mean, divided by the micro-batches of the step by its author."""

    loss_is_scaled_for_ga = None  # type: ignore[assignment]

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        return super().compute_loss(*given, **more) / self.current_gradient_accumulation_steps


def mean_losses(folder: str) -> list[Any]:
    """Losses and norms of both steps, for each of the classes."""
    settings: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "learning_rate": 0.0}
    settings |= {"per_device_train_batch_size": 2, "global_batch_size": 8, "num_train_epochs": 1, "max_grad_norm": 0}
    ends = []
    for cls in (Means, DividedMeans):
        training = trainer(folder, ROWS, cls=cls, **settings)
        training.train()
        logs = [entry for entry in training.state.log_history if "loss" in entry]
        ends.append([[entry["loss"], entry["grad_norm"]] for entry in logs])
    return ends


def test_a_dummy_batch_on_one_rank_does_not_shrink_a_mean_over_batches(
    two: list[dict[str, Any]], tmp_path: Path
) -> None:
    [alone] = run_distributed(mean_losses, 1, str(tmp_path))
    zero, one = (rank["mean_losses"] for rank in two)
    assert zero == one
    for steps, expected in zip(zero, alone, strict=True):
        assert len(steps) == 2 and expected[0] == expected[1]
        assert steps == [pytest.approx(pair, rel=1e-5) for pair in expected]


def laid_out(folder: str) -> list[int]:
    sizes = {"replicate": 2, "tensor": 2}
    helper = trainer(folder, None, model=llama(), parallelism=sizes).accelerator
    config = helper.parallelism_config
    assert (config.dp_replicate_size, config.dp_shard_size, config.tp_size, config.sp_size) == (2, 1, 2, 1)
    assert config.tp_enabled and config.data_parallel_size == 2 and helper.state.parallelism_config is config
    mesh = helper.torch_device_mesh
    assert mesh.mesh_dim_names == ("dp_replicate", "tp") and mesh["tp"].get_local_rank() == helper.tensor_parallel_rank
    return [helper.data_parallel_rank, helper.data_parallel_shard_rank, helper.tensor_parallel_rank]


def test_the_accelerator_has_the_sizes_and_places_of_a_layout(tmp_path: Path) -> None:
    assert run_distributed(laid_out, 4, str(tmp_path)) == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]


def unwrapping(folder: str) -> None:
    """In a process of its own: the compiler changes what every later step calls."""
    import peft

    training = trainer(folder, None)
    unwrap = training.accelerator.unwrap_model
    model: Any = torch.compile(training.model, backend="eager")
    assert unwrap(model) is unwrap(nn.DataParallel(model)) is training.model
    assert unwrap(model, keep_torch_compile=True) is model
    adapted = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"]))
    compiled: Any = torch.compile(adapted, backend="eager")
    assert unwrap(compiled) is unwrap(adapted) is adapted


def test_unwrap_model_goes_through_the_wrapper_of_the_compiler(tmp_path: Path) -> None:
    run_distributed(unwrapping, 1, str(tmp_path))
