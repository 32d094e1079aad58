"""Mixtures: sources are passed evenly by their weights, at any position at once, with changes from a step on."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_lib import Trainer, TrainingArguments
from trainer_lib.data.loading.loader import TrainLoader
from trainer_lib.data.loading.mixture_order import BLOCK, MixtureOrder
from trainer_lib.data.loading.order import BatchPlan, RandomOrder
from trainer_lib.data.rows.mixture import INFO, Mixture, Piece, count_sources, merge_weights
from trainer_lib.errors import ConfigError, DataError
from trainer_lib.trainer.model.source_losses import KEY, SourceLosses, WithSources, take_sources
from trainflow.flows.lineage.reproduction import mixed_alike
from trainflow.flows.spec.spec import parse_spec

NAMES = "abcdef"
WEIGHT = st.floats(0.01, 100)
FAR = [113839, 10546036, 10384305, 5084948, 5512386, 9503434, 901076, 6077894]


def order_of(
    sizes: list[int],
    weights: list[float],
    *,
    budgets: dict[str, int] | None = None,
    later: tuple[Piece, ...] = (),
    batch: int = 8,
) -> MixtureOrder:
    rows = dict(zip(NAMES, sizes, strict=False))
    shares = merge_weights(dict(zip(NAMES, weights, strict=False)), {}, field="weights")
    return MixtureOrder(Mixture(rows, budgets or {}, [Piece(0, shares), *later]), seed=5, batch=batch)


def sources_of(order: MixtureOrder, indices: np.ndarray) -> list[str]:
    """The name of the source of each index."""
    ends = np.cumsum(list(order.mixture.rows.values()))
    return [order.names[place] for place in np.searchsorted(ends, indices, side="right")]


def epoch_of(order: MixtureOrder, epoch: int) -> np.ndarray:
    return order.indices(epoch, 0, order.num_samples)


@st.composite
def orders(draw: st.DrawFn) -> MixtureOrder:
    sizes = draw(st.lists(st.integers(1, 900), min_size=1, max_size=6))
    weights = draw(st.lists(WEIGHT, min_size=len(sizes), max_size=len(sizes)))
    names = draw(st.sets(st.sampled_from(NAMES[: len(sizes)])))
    budgets = {name: draw(st.integers(1, 1500)) for name in sorted(names)}
    changed = draw(st.lists(WEIGHT, min_size=len(sizes), max_size=len(sizes)))
    later = Piece(draw(st.integers(1, 400)), dict(zip(NAMES, changed, strict=False)))
    return order_of(sizes, weights, budgets=budgets, later=(later,))


@given(orders())
def test_rows_come_once_in_each_pass_over_their_source(order: MixtureOrder) -> None:
    """Passes run on over the ends of epochs; a source with a budget gives no more in any of them."""
    epochs = [epoch_of(order, epoch) for epoch in range(3)]
    seen, first = np.concatenate(epochs), 0
    for name, size in order.mixture.rows.items():
        own = seen[(seen >= first) & (seen < first + size)] - first
        for start in range(0, len(own), size):
            part = own[start : start + size]
            assert len(set(part.tolist())) == len(part)
        first += size
        if (budget := order.mixture.budgets.get(name)) is not None:
            assert all(sources_of(order, rows).count(name) <= budget for rows in epochs)
    assert len(seen) == 3 * order.num_samples


@given(orders(), st.integers(0, 2), st.data())
def test_any_stretch_is_that_of_the_whole_walk(order: MixtureOrder, epoch: int, data: st.DataObject) -> None:
    whole = epoch_of(order, epoch)
    start = data.draw(st.integers(0, order.num_samples))
    stop = data.draw(st.integers(start, order.num_samples))
    fresh = MixtureOrder(order.mixture, order.seed, order.batch)
    assert np.array_equal(fresh.indices(epoch, start, stop), whole[start:stop])


@given(st.lists(WEIGHT, min_size=1, max_size=6))
def test_each_block_has_the_shares_of_the_weights_within_one_row(weights: list[float]) -> None:
    order = order_of([1500] * len(weights), weights)
    [segment] = order._segments(0)
    blocks = range(segment.block_at(order.num_samples - 1))
    shares = np.array(list(order.mixture.pieces[0].weights.values()))
    for first, behind in pairwise([sum(segment.before(block)) for block in [*blocks, blocks.stop]]):
        counts = np.bincount(order.indices(0, first, behind) // 1500, minlength=len(weights))
        assert np.abs(counts - shares * BLOCK).max() <= 1.001


def test_budgets_are_used_up_exactly() -> None:
    order = order_of([100, 900], [1.0, 1.0], budgets={"a": 200, "b": 900})
    counts = Counter(epoch_of(order, 0).tolist())
    assert (order.num_samples, {counts[row] for row in range(100)}) == (1100, {2})
    assert all(counts[row] == 1 for row in range(100, 1000))
    # Behind the end of the smaller one the other continues alone.
    assert set(sources_of(order, order.indices(0, 400, 1100))) == {"b"}


def test_a_far_position_costs_as_much_as_a_near_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is computed: some blocks of the mixture, and of each source's order those blocks that they meet."""
    walked: list[int] = []
    walk = RandomOrder._walk

    def count(self: RandomOrder, positions: Any, key: Any) -> Any:
        walked.append(len(positions))
        return walk(self, positions, key)

    monkeypatch.setattr(RandomOrder, "_walk", count)
    found = order_of([3_000_000, 9_000_000, 70_000], [3.0, 5.0, 2.0]).indices(0, 10**7, 10**7 + 8)
    assert sum(walked) <= 6 * 1024
    assert found.tolist() == FAR  # never changes with a library's version


class Rows(list[Any]):
    mixture = Mixture({"a": 4, "b": 4}, {}, [Piece(0, {"a": 0.5, "b": 0.5})])


def trainer_of(folder: Path, **args: Any) -> Trainer:
    settings = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **args)
    return Trainer(torch.nn.Linear(1, 1), settings, train_dataset=Rows(range(8)), data_collator=list)


def test_a_mixture_is_not_sorted_by_length_and_may_keep_the_order_of_its_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not by length"):
        trainer_of(tmp_path, train_sampling_strategy="group_by_length").get_train_dataloader()
    order = trainer_of(tmp_path, train_sampling_strategy="sequential").get_train_dataloader().order
    found = epoch_of(order, 0).tolist()
    assert [row for row in found if row < 4] == [0, 1, 2, 3] != found[:4]


# -- changes ----------------------------------------------------------------------------------------------------------
def loader_of(order: MixtureOrder, workers: int = 0) -> TrainLoader:
    given: dict[str, Any] = {"global_batch": 8, "micro_batch": 4, "drop_last": False}
    plan = BatchPlan.cut(order.num_samples, data_parallel_size=1, rank=0, **given)
    options = {"num_workers": workers, "prefetch_factor": 4 if workers else None}
    return TrainLoader(list(range(220)), order=order, plan=plan, collate=list, seed=1, options=options)


def read(loader: TrainLoader, epoch: int, step: int, *, change_at: int | None = None) -> list[Any]:
    """The micro-batches of an epoch from a step on; weights change in front of `change_at`."""
    micros, found = loader.micros(epoch, step), []
    for micro in micros:
        found.append(micro.batch)
        if len(found) == 2 * (change_at or 0):
            assert isinstance(loader.order, MixtureOrder)
            loader.order.change(step + len(found) // 2, {"a": 3.0, "b": 0.5}, name="x")
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_a_change_is_what_a_schedule_would_have_and_is_restored(workers: int) -> None:
    """With a worker, which has read ahead of the step from which on the weights count."""
    whole = read(loader_of(order_of([50, 170], [1.0, 2.0])), 0, 0)
    changed = loader_of(order_of([50, 170], [1.0, 2.0]), workers)
    seen = read(changed, 0, 0, change_at=9)
    assert (seen[:18], seen[18:] != whole[18:]) == (whole[:18], True)
    later = Piece(9, merge_weights({"a": 1.0, "b": 2.0}, {"a": 9.0, "b": 1.5}, field="weights"))
    assert read(loader_of(order_of([50, 170], [1.0, 2.0], later=(later,))), 0, 0) == seen
    resumed = loader_of(order_of([50, 170], [1.0, 2.0]))
    resumed.load_state(changed.state(), epoch=0, step=12)
    assert read(resumed, 0, 12) == seen[24:] and read(resumed, 1, 0) == read(changed, 1, 0)
    with pytest.raises(ConfigError, match="position in the data"):
        loader_of(order_of([50, 170], [2.0, 2.0])).load_state(changed.state(), epoch=0, step=12)


def test_a_change_stays_for_sources_that_the_schedule_does_not_name() -> None:
    later = (Piece(20, {"a": 1.0}),)
    live = order_of([50, 170], [1.0, 2.0], later=later)
    live.change(9, {"b": 0.5}, name="x")
    assert live.weights_at(19) == pytest.approx({"a": 0.4, "b": 0.6})
    assert live.weights_at(20) == pytest.approx({"a": 0.625, "b": 0.375})
    planned = order_of([50, 170], [1.0, 2.0], later=(Piece(9, live.changes[0]["weights"]), *later))
    assert all(np.array_equal(epoch_of(live, epoch), epoch_of(planned, epoch)) for epoch in range(3))


@pytest.mark.parametrize(
    ("weights", "what"),
    [({"c": 1.0}, "no such source"), ({"a": -1.0}, "not a weight"), ({"a": 0.0, "b": 0.0}, "No source has a weight")],
)
def test_a_wrong_change_leaves_the_mixture_as_it_was(weights: dict[str, float], what: str) -> None:
    order = order_of([50, 170], [1.0, 2.0], budgets={"b": 10})
    before = epoch_of(order, 0).tolist()
    with pytest.raises(ConfigError, match=what):
        order.change(3, weights, name="x")
    with pytest.raises(ConfigError, match="used up"):
        order.change(3, {"a": 0.0}, name="x")
    assert (order.changes, epoch_of(order, 0).tolist()) == ([], before)


# -- settings ---------------------------------------------------------------------------------------------------------
def spec_with(mixture: Any, **prepare: Any) -> Any:
    section = {"mixture": mixture, **prepare}
    return parse_spec({"name": "mixed", "recipe": "causal-language-modeling", "prepare": section})


@pytest.mark.parametrize(
    ("mixture", "what"),
    [
        ([{"source": "a.txt", "weight": -1}], "at least 0"),
        ([{"source": "a.txt", "weight": 0}], "No source has a weight above 0"),
        ([{"source": "a.txt", "weight": 1}, {"source": "b.txt"}], "give all or none"),
        ([{"source": "a.txt"}, {"source": "x/a.txt"}], "two sources are called 'a'"),
        ([{"source": "a.txt", "epochs": 1, "tokens": 5}], "epochs and tokens"),
        ([{"source": "a.txt", "epoch": 1}], "Did you mean 'epochs'"),
        ({"sources": [{"source": "a.txt"}], "schedule": {5: {"b": 1}}}, "no such source"),
        ({"sources": [{"source": "a.txt"}], "schedule": {-5: {"a": 1}}}, "above 0"),
        ({"sources": [{"source": "a.txt"}], "schedule": {5: {"a": 0}}}, "No source has a weight above 0"),
        ({"sources": [{"source": "a.txt"}], "temperature": 0}, "above 0"),
    ],
)
def test_what_cannot_be_mixed_is_refused(mixture: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        spec_with(mixture)
    assert str(caught.value.field).startswith("prepare")


def test_the_mixture_names_the_sources() -> None:
    mixture = [{"source": "web/*.jsonl"}, {"source": "stdlib:json"}, {"source": "c.csv", "name": "mine"}]
    spec = spec_with({"sources": mixture, "schedule": {20: {"web": 2}, 5: {"json": 0}}})
    assert [step for step, _ in spec.prepare.mixture.to_info()["schedule"]] == [5, 20]
    assert spec.prepare.sources == ["web/*.jsonl", "stdlib:json", "c.csv"]
    assert spec.prepare.mixture.names == ("web", "json", "mine") and parse_spec(spec.to_record()) == spec
    assert spec.evaluate_config().slices == ["source"]
    alike = mixed_alike(spec, [{"step": 9, "weights": {"web": 1.0, "json": 0.0, "mine": 1.0}}])
    assert alike.prepare.mixture is not None and sorted(alike.prepare.mixture.schedule) == [5, 9, 20]
    with pytest.raises(ConfigError, match=r"Remove prepare\.sources"):
        spec_with(mixture, sources=["other.csv"])


def info_of(tokens: dict[str, int] | None = None, **entries: dict[str, Any]) -> dict[str, Any]:
    usual = {"weight": None, "epochs": None, "tokens": None}
    sources = [{"name": name, **usual, **entry} for name, entry in entries.items()]
    rows = {"train": {"a": 100, "b": 400}}
    return {"sources": sources, "rows": rows, "tokens": {"train": tokens or {}}, "temperature": 2, "schedule": []}


def test_weights_and_budgets_follow_from_sizes() -> None:
    mixture = Mixture.of(info_of(a={}, b={}), "train")
    assert mixture.pieces[0].weights == pytest.approx({"a": 1 / 3, "b": 2 / 3})  # 10 to 20
    budgets = Mixture.of(info_of({"a": 1000, "b": 4000}, a={"epochs": 2.5}, b={"tokens": 2000}), "train")
    assert (budgets.budgets, budgets.epoch_rows) == ({"a": 250, "b": 200}, 450)


@pytest.mark.parametrize(
    ("info", "split", "what"),
    [
        (info_of(a={}, c={}), "train", "'c' has no rows"),
        (info_of(a={}, b={}), "other", "not counted"),
        (info_of(a={}, b={"tokens": 5}), "train", "no tokens"),
    ],
)
def test_rows_that_cannot_be_mixed_are_refused(info: dict[str, Any], split: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Mixture.of(info, split)


def test_rows_are_counted_by_source() -> None:
    info: dict[str, Any] = {}
    rows = [{"source": name, "input_ids": [1, 2]} for name in "aab"]
    assert list(count_sources(rows, ("a", "b"), "train", info)) == rows
    assert info == {INFO: {"rows": {"train": {"a": 2, "b": 1}}, "tokens": {"train": {"a": 4, "b": 2}}}}
    endless = itertools.chain([{"source": "a"}] * 5, itertools.repeat({"source": "b"}))
    assert [row["source"] for row in count_sources(endless, ("a", "b"), "test", info, 2)] == ["a", "a", "b", "b"]
    for wrong in ([{"x": 1}], [{"source": "c"}], [{"source": "b"}, {"source": "a"}]):
        with pytest.raises(DataError, match=r"Row \d of 'train'"):
            list(count_sources(wrong, ("a", "b"), "train", {}))


# -- losses -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(3,), (3, 5)])
def test_the_loss_of_each_source_is_the_mean_over_its_targets(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 7, shape)
    labels[0] = -100
    rows = [{"source": name} for name in ("b", "a", "b")]
    batch, sources = take_sources(WithSources(lambda _: {"labels": labels}, ("a", "b", "c"))(rows))
    assert sources is not None and KEY not in batch
    logits = torch.randn(*shape, 7)
    losses = SourceLosses(("a", "b", "c"))
    losses.add({"logits": logits}, labels, sources, shifts=len(shape) > 1)
    losses.collect(lambda sums: sums * 2, torch.device("cpu"))  # as of two equal ranks
    kept = SourceLosses(("a", "b", "c"))
    kept.load_state(losses.state())
    scores, targets = (logits, labels) if len(shape) == 1 else (logits[:, :-1], labels[:, 1:])
    wanted = {
        f"loss_{name}": torch.nn.functional.cross_entropy(scores[row].reshape(-1, 7), targets[row].reshape(-1)).item()
        for name, row in (("a", 1), ("b", 2))
    }
    assert kept.take() == losses.take() == pytest.approx(wanted)
    assert losses.take() == {}
