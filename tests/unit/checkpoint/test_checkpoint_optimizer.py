"""An optimizer goes on after a restore as if nothing had happened, bit for bit, whatever it keeps."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.optimizers import Listed, Lookahead, Outside, Several
from trainer_lib.arguments import OptimizerNames, TrainingArguments
from trainer_lib.checkpoint.optimizer import (
    OptimizerSnapshot,
    _describe_place,
    _target_device,
    restore_optimizer,
    snapshot_optimizer,
)
from trainer_lib.checkpoint.values import from_json, to_json
from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.optim import build_optimizer
from trainer_lib.optim.packages import PACKAGED


class Model(nn.Module):
    """Frozen, unused, tied and 0-dim parameters, integer and boolean buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.mask: Tensor
        self.calls: Tensor
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.frozen(self.norm(self.embed(x))) * self.mask * self.scale
        loss: Tensor = self.head(hidden).float().logsumexp(-1).mean()
        return loss


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


class Nested(torch.optim.Optimizer):
    """Keeps what torch's own do not: nested dicts, lists of tensors, tuples, flags, number keys, None."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "history": []})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["history"].append(len(group["history"]))
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["factored"] = {"row": torch.zeros(param.shape[:1]), 3: {"flag": True, "none": None}}
                    state["grads"] = []
                    state["shape"] = tuple(param.shape)
                    state["count"] = 0
                    state["__tuple__"] = "a name that is also a mark"
                state["count"] += 1
                state["grads"] = [*state["grads"][-2:], param.grad.clone()]
                state["factored"]["row"] = state["factored"]["row"] * 0.9 + len(state["grads"])
                param.data.add_(torch.stack(state["grads"]).mean(0), alpha=-group["lr"] * state["count"])


class Wrapped(torch.optim.Optimizer):
    """Keeps a tensor that consists of others, as the quantized states of torchao do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            if not self.state[param]:
                two: Any = TwoTensor
                self.state[param]["pair"] = two(torch.zeros_like(param), torch.ones_like(param))
            pair = self.state[param]["pair"]
            pair.a.mul_(0.9).add_(param.grad)
            pair.b.add_(pair.a.square())
            param.data.add_(pair.a / pair.b.sqrt(), alpha=-0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), capturable=False, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "nested": lambda p: Nested(p),
    "wrapped": lambda p: Wrapped(p),
    "lookahead": lambda p: Lookahead(p),
    "several behind one": lambda p: Several(p),
    "a list of several": lambda p: Listed(p),
    "state outside of state": lambda p: Outside(p),
}


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(0, 7, (6,), generator=generator)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[Tensor], count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def through_json(snapshot: OptimizerSnapshot) -> OptimizerSnapshot:
    # As safetensors files: row-major, whatever the strides were.
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in snapshot.tensors.items()}
    groups, scalars = json.loads(json.dumps([snapshot.groups, snapshot.scalars]))
    return OptimizerSnapshot(tensors, groups, scalars)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, TwoTensor):
        return isinstance(two, TwoTensor) and same([one.a, one.b], [two.a, two.b])
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and one.dtype == two.dtype and one.device == two.device and torch.equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and bool(one == two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_never_stopped(name: str, dtype: torch.dtype) -> None:
    make = OPTIMIZERS[name]
    model = Model(dtype)
    data = batches()
    optimizer = make(trainable(model))
    steps(model, optimizer, data, 3)

    snapshot = through_json(snapshot_optimizer(optimizer, model.named_parameters()))
    other = Model(dtype)
    other.load_state_dict(model.state_dict())
    restored = make(trainable(other))
    restore_optimizer(restored, other.named_parameters(), snapshot)

    for param, twin in zip(trainable(model), trainable(other), strict=True):
        assert same(optimizer.state.get(param, {}), restored.state.get(twin, {}))
    for group, twin_group in zip(optimizer.param_groups, restored.param_groups, strict=True):
        assert same({**group, "params": 0}, {**twin_group, "params": 0})
    again = batches()
    for _ in range(3):
        next(again)
    assert steps(other, restored, again, 3) == steps(model, optimizer, data, 3)
    for name_, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name_])


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "channels last": lambda: torch.randn(6, 4, 3, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(12, 7).t(),
    "permuted": lambda: torch.randn(5, 4, 6).permute(2, 0, 1),
    "transposed view with gaps": lambda: torch.randn(8, 14)[:, ::2].t(),
    "part of a buffer": lambda: torch.randn(200)[7:91].view(12, 7),
}
SHIPPED = sorted(
    name
    for name in {each.value for each in OptimizerNames} - {each.value for each in PACKAGED}
    if not name.endswith(("_layerwise", "_xla"))  # refused when arguments are made
)


class Laid(nn.Module):
    """A weight in a layout of memory, and a vector."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(LAYOUTS[layout]())
        self.vector = nn.Parameter(torch.randn(7))

    def forward(self, seed: Tensor) -> Tensor:
        factors = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(int(seed[0])))
        loss: Tensor = (self.weight * factors).sin().sum() + self.vector.cos().sum()
        return loss


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHIPPED)
def test_restored_state_lies_in_memory_as_state_that_was_never_saved(name: str, layout: str) -> None:
    args = TrainingArguments("unused", optim=name, learning_rate=0.01, weight_decay=0.1)
    model, other = Laid(layout), Laid(layout)
    optimizer, restored = build_optimizer(args, model), build_optimizer(args, other)
    steps(model, optimizer, batches(), 3)
    other.load_state_dict(model.state_dict())
    restore_optimizer(
        restored, other.named_parameters(), through_json(snapshot_optimizer(optimizer, model.named_parameters()))
    )
    for param, twin in zip(model.parameters(), other.parameters(), strict=True):
        kept = [each.stride() for each in optimizer.state[param].values() if isinstance(each, Tensor)]
        assert kept == [each.stride() for each in restored.state[twin].values() if isinstance(each, Tensor)]
    assert steps(model, optimizer, batches(), 3) == steps(other, restored, batches(), 3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def stepped(param: nn.Parameter, **settings: Any) -> torch.optim.Optimizer:
    """SGD with momentum after a step, or what `settings` say."""
    optimizer = torch.optim.SGD([param], **{"lr": 0.1, "momentum": 0.9, **settings})
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_state_takes_the_layout_that_the_parameter_has_now() -> None:
    """A checkpoint of a row-major model, or one that another program wrote, resumed in channels_last."""
    param = nn.Parameter(torch.randn(6, 4, 3, 5))
    optimizer = torch.optim.AdamW([param], fused=True)
    param.grad = torch.randn(6, 4, 3, 5)
    optimizer.step()
    now = nn.Parameter(param.detach().to(memory_format=torch.channels_last))
    restored = torch.optim.AdamW([now], fused=True)
    restore_optimizer(restored, {"w": now}, through_json(snapshot_optimizer(optimizer, {"w": param})))
    assert restored.state[now]["exp_avg"].stride() == now.stride()
    assert torch.equal(restored.state[now]["exp_avg"], optimizer.state[param]["exp_avg"])


def test_the_moments_of_low_precision_weights_keep_their_precision() -> None:
    param = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([param])
    optimizer.state[param] = {"step": torch.tensor(3.0), "exp_avg": torch.randn(5), "exp_avg_sq": torch.rand(5)}
    wanted = optimizer.state[param]["exp_avg"].clone()
    restore_optimizer(optimizer, {"w": param}, through_json(snapshot_optimizer(optimizer, {"w": param})))
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32
    assert torch.equal(optimizer.state[param]["exp_avg"], wanted) and optimizer.state[param]["step"].shape == ()


def test_state_follows_the_name_not_the_position() -> None:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([one, two], lr=0.1, momentum=0.9)
    one.grad, two.grad = torch.full((2,), 1.0), torch.full((3,), 2.0)
    optimizer.step()
    snapshot = through_json(snapshot_optimizer(optimizer, {"one": one, "two": two}))
    other = torch.optim.SGD([two, one], lr=0.5, momentum=0.1)
    restore_optimizer(other, {"one": one, "two": two}, snapshot)
    assert torch.equal(other.state[one]["momentum_buffer"], torch.full((2,), 1.0))
    assert torch.equal(other.state[two]["momentum_buffer"], torch.full((3,), 2.0))
    assert (other.param_groups[0]["lr"], other.param_groups[0]["momentum"]) == (0.1, 0.9)
    assert other.param_groups[0]["params"] == [two, one]


def test_a_snapshot_is_not_changed_by_the_optimizer_it_was_put_into() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = stepped(param)
    snapshot = through_json(snapshot_optimizer(optimizer, {"w": param}))
    before = snapshot.tensors["w/momentum_buffer"].clone()
    restore_optimizer(optimizer, {"w": param}, snapshot)
    optimizer.step()
    assert torch.equal(snapshot.tensors["w/momentum_buffer"], before)


def test_how_to_compute_stays_as_it_is_set_now_and_a_first_state_is_empty() -> None:
    param = nn.Parameter(torch.ones(2))
    saved = torch.optim.AdamW([param], lr=0.5, fused=True)
    now = torch.optim.AdamW([param], lr=0.1, foreach=True)
    param.grad = torch.ones(2)
    now.step()
    restore_optimizer(now, {"w": param}, through_json(snapshot_optimizer(saved, {"w": param})))
    assert now.param_groups[0]["lr"] == 0.5
    assert (now.param_groups[0]["fused"], now.param_groups[0]["foreach"]) == (None, True) and len(now.state) == 0


def test_other_parameters_are_refused_by_name() -> None:
    one, two, three = (nn.Parameter(torch.ones(1)) for _ in range(3))
    saved = snapshot_optimizer(torch.optim.SGD([one, two], lr=1), {"one": one, "two": two})
    with pytest.raises(ConfigError, match=r"only in the checkpoint: \['two'\]; only in the optimizer now: \['three'\]"):
        restore_optimizer(torch.optim.SGD([one, three], lr=1), {"one": one, "three": three}, saved)
    regrouped = torch.optim.SGD([{"params": [one]}, {"params": [two]}], lr=1)
    with pytest.raises(ConfigError, match="divide the parameters differently"):
        restore_optimizer(regrouped, {"one": one, "two": two}, saved)


def test_a_tensor_in_two_places_of_the_state_is_written_once() -> None:
    model = Model()
    optimizer = Lookahead(trainable(model))
    steps(model, optimizer, batches(), 2)
    tensors = snapshot_optimizer(optimizer, model.named_parameters()).tensors
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == len(tensors)


def test_what_cannot_be_saved_is_refused_by_name() -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer: Any = torch.optim.SGD([param], lr=1)
    with pytest.raises(ConfigError, match="not parameters of the model"):
        snapshot_optimizer(optimizer, {})
    optimizer.caches = {"a": [torch.ones(1), Opaque()]}
    with pytest.raises(ConfigError, match=r"'attributes/caches\.a\.1' holds a Opaque"):
        snapshot_optimizer(optimizer, {"w": param})
    del optimizer.caches
    optimizer.state[nn.Parameter(torch.ones(1))] = {"x": 1}
    with pytest.raises(ConfigError, match="not one of its parameters"):
        snapshot_optimizer(optimizer, {"w": param})


def test_a_snapshot_that_lacks_something_or_has_another_form_is_refused() -> None:
    model = Model()
    several = Several(trainable(model))
    snapshot = through_json(snapshot_optimizer(several, model.named_parameters()))
    del snapshot.scalars["inner"]
    with pytest.raises(ConfigError, match=r"no state for the optimizer in Several\.parts\.0"):
        restore_optimizer(several, model.named_parameters(), snapshot)
    param = nn.Parameter(torch.randn(2, 3))
    optimizer = stepped(param)
    with pytest.raises(DamagedError, match="momentum_buffer"):
        restore_optimizer(optimizer, {"w": param}, replace(snapshot_optimizer(optimizer, {"w": param}), tensors={}))
    optimizer.state[param]["momentum_buffer"] = torch.randn(3, 2).t()
    snapshot = through_json(snapshot_optimizer(optimizer, {"w": param}))
    snapshot.scalars["state"]["w"]["momentum_buffer"]["order"] = [1, 1 << 60]
    with pytest.raises(DamagedError, match="malformed"):
        restore_optimizer(optimizer, {"w": param}, snapshot)
    wrapped = Wrapped(trainable(model))
    steps(model, wrapped, batches(), 1)
    snapshot = through_json(snapshot_optimizer(wrapped, model.named_parameters()))
    snapshot.scalars["state"]["scale"]["pair"]["class"] = "subprocess:Popen"
    with pytest.raises(DamagedError, match="class 'subprocess:Popen' that is not known here"):
        restore_optimizer(wrapped, model.named_parameters(), snapshot)
    for damaged in ({"__tensor__": "x"}, {"__scalar__": ["1", "float32"]}, {"__scalar__": [1, "save"]}):
        with pytest.raises(DamagedError):
            from_json(damaged)


class Opaque:
    """Nothing JSON knows."""


@pytest.mark.parametrize("value", [Opaque(), {1, 2}, b"bytes", {b"bytes": 3}, torch.ones(1), [Opaque()]])
def test_what_would_need_pickle_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"'state/x.*without pickle"):
        to_json(value, "state/x")


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -1.5e-300, float("inf"), "é", [], (), {}, (1, (2, [3])), {"a": {"b": (1,)}}, {1: {"x": 1}},
        {"__tuple__": 1}, {"__tensor__": "x"}, {"__dict__": {}}, {(1, 2): 3}, {0.9: [1]}, {("a", (1,)): {}},
        deque([1, (2,)], maxlen=3), deque(), {"__deque__": 1}, torch.bfloat16, {"dtype": torch.int8},
        [torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)], torch.tensor(7), torch.tensor(0.3).bfloat16(),
        torch.tensor(True), {"__scalar__": [1, "int64"]},
    ],
)  # fmt: skip
def test_values_come_back_exactly(value: Any) -> None:
    assert same(from_json(json.loads(json.dumps(to_json(value, "x")))), value)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    ],
    ids=["multi-step", "one-cycle", "cosine restarts", "lambda"],
)
def test_a_schedule_goes_on_after_json(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    optimizer, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    schedule, resumed = make(optimizer), make(other)

    def advance(one: Any) -> Any:
        one.optimizer.step()
        one.step()
        return one.get_last_lr()

    for _ in range(3):
        advance(schedule)
    saved = json.loads(json.dumps(to_json(schedule.state_dict(), "scheduler")))
    other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    resumed.load_state_dict(from_json(saved))
    assert [advance(resumed) for _ in range(6)] == [advance(schedule) for _ in range(6)]


@pytest.mark.parametrize(
    ("placed", "shape", "group", "where"),
    [
        ("param", (3,), {}, "meta"),  # a moment beside its weight
        ("any", (3,), {}, "meta"),  # saved on a CPU, resumed on a device
        ("cpu", (3,), {}, "cpu"),  # offloaded then, offloaded now
        ("any", (), {}, "cpu"),  # a step count belongs on the host
        ("cpu", (), {}, "cpu"),
        ("any", (), {"fused": True}, "meta"),  # but where the implementation reads it on the device
        ("cpu", (), {"capturable": True}, "meta"),
        ("param", (), {}, "meta"),
    ],
)
def test_state_goes_where_it_is_needed(placed: str, shape: tuple[int, ...], group: dict[str, Any], where: str) -> None:
    param = nn.Parameter(torch.empty(3, device="meta"))  # stands for any device that is not the CPU
    assert _target_device(placed, torch.ones(shape), param, group).type == where


def test_where_state_lives_is_recorded() -> None:
    elsewhere, here = torch.ones(3, device="meta"), torch.ones(3)
    pairs = ((elsewhere, elsewhere), (here, elsewhere), (here, here), (here, None))
    assert [_describe_place(tensor, param) for tensor, param in pairs] == ["param", "cpu", "any", "any"]
