"""Optimizers by name, their settings, and which parameters decay."""

from __future__ import annotations

import copy
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer_lib.arguments import OptimizerNames, TrainingArguments
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.optim import (
    build_optimizer,
    create_optimizer_cls_and_kwargs,
    get_decay_parameter_names,
    parameter_groups,
    parse_optim_args,
)
from trainer_lib.optim.optimizers import Lion, MuonAdamW
from trainer_lib.optim.packages import PACKAGED, _round_alike, matches

REFUSED = [name for name in OptimizerNames if name.value.endswith(("_layerwise", "_xla"))]
SERVED = [name for name in OptimizerNames if name not in PACKAGED and name not in REFUSED]


class RMSNormOfTheirs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.ln_1 = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.act = RMSNormOfTheirs(8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.lm_head = nn.Linear(8, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.frozen(self.act(self.hidden(self.ln_1(self.embed(tokens))))))
        return out


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    tokens = torch.arange(11)
    for _ in range(times):
        optimizer.zero_grad()
        model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()


def _args(**given: Any) -> TrainingArguments:
    return TrainingArguments("out", **given)


@pytest.mark.parametrize("name", SERVED)
def test_what_torch_and_we_serve_trains_every_trainable_parameter(name: OptimizerNames) -> None:
    torch.manual_seed(0)
    model = Tiny()
    before = copy.deepcopy(model.state_dict())
    _step(model, build_optimizer(_args(optim=name.value, learning_rate=0.01, weight_decay=0.01), model), 3)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) == key.startswith("frozen"), key
        assert torch.isfinite(value).all()


def test_adafactor_is_the_one_of_transformers_with_the_arguments_of_its_trainer() -> None:
    import transformers

    given: dict[str, Any] = {"learning_rate": 0.01, "optim": "adafactor"}
    theirs, settings = transformers.Trainer.get_optimizer_cls_and_kwargs(transformers.TrainingArguments("out", **given))
    assert create_optimizer_cls_and_kwargs(_args(**given)) == (theirs, settings)
    cls, kwargs = create_optimizer_cls_and_kwargs(_args(**given, optim_args="clip_threshold=0.5,decay_rate=-0.7"))
    assert (cls, kwargs) == (theirs, {**settings, "clip_threshold": 0.5, "decay_rate": -0.7})
    with pytest.raises(ConfigError, match="clip_treshold"):
        create_optimizer_cls_and_kwargs(_args(**given, optim_args="clip_treshold=0.5"))


def test_adafactor_may_be_torchs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "transformers.optimization", None)
    assert create_optimizer_cls_and_kwargs(_args(optim="adafactor"))[0] is torch.optim.Adafactor
    assert "torch's Adafactor trains, which is another algorithm" in caplog.text


@pytest.mark.parametrize("name", PACKAGED)
def test_a_missing_package_is_named(name: OptimizerNames) -> None:
    args = _args(optim=name.value, optim_target_modules="all-linear")
    try:
        build_optimizer(args, Tiny().bfloat16())
    except MissingExtraError as error:
        assert (error.field, error.value) == ("optim", name.value)
        assert "pip install" in (error.remedy or "")
    else:
        assert any(
            importlib.util.find_spec(package) for package in ("bitsandbytes", "torchao", "schedulefree", "optimi")
        )


def test_weights_that_are_not_bfloat16_are_refused_where_they_would_be_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", SimpleNamespace(_AdamW=torch.optim.AdamW))
    model = Tiny().bfloat16()
    model.frozen.float()
    model.hidden.float()
    with pytest.raises(ConfigError, match=r"optim = adamw_torch_bf16_sr: .*hidden\.weight is torch\.float32.*bfloat16"):
        build_optimizer(_args(optim="adamw_torch_bf16_sr"), model)


class Drawing(torch.optim.SGD):
    """Steps as torchao's, with random numbers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.setdefault(param, {"step": torch.tensor(0.0)})
                state["step"] += 1
                param.data += torch.rand(param.shape, dtype=param.dtype)


def test_copies_are_rounded_alike_whatever_their_processes_drew() -> None:
    models = [Tiny().bfloat16(), Tiny().bfloat16()]
    models[1].load_state_dict(models[0].state_dict())
    drawn = []
    for rank, model in enumerate(models):
        optimizer = _round_alike(Drawing, 7)(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        torch.rand(rank)  # another rank drew other numbers before
        before = torch.get_rng_state()
        for _ in range(2):
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append(model.hidden.weight.detach().clone())
    assert torch.equal(*drawn)
    assert not torch.equal(models[0].hidden.weight[0], models[0].hidden.weight[1])


@pytest.mark.parametrize("name", REFUSED)
def test_layerwise_optimizers_and_that_of_xla_are_refused_with_the_plain_one_as_way_out(name: OptimizerNames) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingArguments("out", optim=name.value, optim_target_modules="all-linear")
    assert f'"{name.value.removesuffix("_layerwise").removesuffix("_xla")}"' in (caught.value.remedy or "")


def test_settings_follow_from_the_arguments() -> None:
    adam: dict[str, Any] = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "learning_rate": 0.1}
    cls, kwargs = create_optimizer_cls_and_kwargs(_args(**adam))
    assert cls is torch.optim.AdamW
    assert kwargs == {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "fused": True}
    assert create_optimizer_cls_and_kwargs(_args(optim="adamw_torch", **adam))[1].get("fused") is None
    cls, kwargs = create_optimizer_cls_and_kwargs(_args(optim="sgd", optim_args="momentum=0.9, nesterov=true"))
    assert (cls, kwargs) == (torch.optim.SGD, {"lr": 5e-5, "momentum": 0.9, "nesterov": True})
    cls, kwargs = create_optimizer_cls_and_kwargs(_args(optim="adamw_torch", optim_args="betas=(0.5,0.6),amsgrad=true"))
    assert (kwargs["betas"], kwargs["amsgrad"]) == ((0.5, 0.6), True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("", {}),
        ("a=1,b=2.5, c = true ,d=none,e=std", {"a": 1, "b": 2.5, "c": True, "d": None, "e": "std"}),
        ("betas=(0.9,0.95),eps=1e-6", {"betas": (0.9, 0.95), "eps": 1e-6}),
        ("xs=[1, 2],y=3", {"xs": (1, 2), "y": 3}),
    ],
)
def test_optimizer_settings_are_parsed(text: str | None, expected: dict[str, Any]) -> None:
    assert parse_optim_args(text) == expected


@pytest.mark.parametrize(
    ("given", "field", "remedy"),
    [
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, "optim_args.momentun", '"momentum"'),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim_args", "a=1"),
        ({"optim": "sgd", "optim_args": "momentum=1,momentum=2"}, "optim_args", "one of them"),
        ({"optim": "lion", "optim_args": "betas=(2,0.9)"}, "optim_args.betas", "0.9"),
        ({"optim": "adamw_troch"}, "optim", 'Did you mean "adamw_torch"?'),
    ],
)
def test_a_wrong_setting_is_refused_by_name(given: dict[str, Any], field: str, remedy: str) -> None:
    args = _args()
    vars(args).update(given)
    with pytest.raises(ConfigError) as caught:
        build_optimizer(args, Tiny())
    assert caught.value.field == field
    assert remedy in (caught.value.remedy or "")


# -------------------------------------------------------------------------------------------- decay
def test_biases_and_norms_do_not_decay() -> None:
    assert get_decay_parameter_names(Tiny()) == ["embed.weight", "hidden.weight", "frozen.weight", "lm_head.weight"]
    norms = (nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True))
    for norm in norms:
        assert get_decay_parameter_names(nn.Sequential(nn.Linear(4, 4), norm)) == ["0.weight"]


def test_groups_hold_trainable_parameters_once() -> None:
    model = Tiny()
    groups = parameter_groups(model, 0.1, get_decay_parameter_names(model))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted([id(parameter) for parameter in model.parameters() if parameter.requires_grad])
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1, ["weight"])) == 1


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="model = Linear"):
        build_optimizer(_args(), model)


def test_a_view_with_gaps_in_memory_trains_as_plain_weights() -> None:
    """torch's fused kernel would change the elements in between."""
    torch.manual_seed(0)
    memory = torch.randn(8, 14)
    view, plain = nn.Module(), nn.Module()
    view.weight, plain.weight = nn.Parameter(memory[:, ::2]), nn.Parameter(memory[:, ::2].clone())
    between = memory[:, 1::2].clone()
    for model in (view, plain):
        optimizer = build_optimizer(TrainingArguments("unused", optim="adamw_torch_fused"), model)
        for factor in (1.0, 2.0):
            optimizer.zero_grad()
            (next(model.parameters()) * factor).sin().sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    torch.testing.assert_close(*view.parameters(), *plain.parameters())
    assert torch.equal(memory[:, 1::2], between)


def test_a_users_own_choice_is_taken() -> None:
    optimizer = build_optimizer(
        _args(weight_decay=0.2), Tiny(), cls_and_kwargs=(torch.optim.SGD, {"lr": 0.3}), decay_names=[]
    )
    assert isinstance(optimizer, torch.optim.SGD)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.3, 0.0)]
    with pytest.raises(ConfigError, match="optimizer per parameter"):
        build_optimizer(_args(), Tiny(), cls_and_kwargs=(torch.optim.SGD, {"optimizer_dict": {}}))


def test_parameter_groups_under_the_name_of_the_reference_are_taken() -> None:
    model, outside = Tiny(), nn.Linear(2, 2)
    groups = [{"params": list(model.parameters())}, {"params": list(outside.parameters()), "lr": 0.5}]
    chosen = (torch.optim.SGD, {"lr": 0.1, "optimizer_dict": groups})
    optimizer = build_optimizer(_args(), model, cls_and_kwargs=chosen)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()]) + 2


# --------------------------------------------------------------------------------------- lion, muon
def test_lion_follows_its_formula() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    momentum, expected = torch.zeros(2), parameter.detach().clone()
    for gradient in (torch.tensor([0.5, -1.0]), torch.tensor([-3.0, 0.1])):
        parameter.grad = gradient.clone()
        optimizer.step()
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * torch.sign(0.9 * momentum + 0.1 * gradient)
        momentum = 0.99 * momentum + 0.01 * gradient
    assert torch.allclose(parameter, expected) and torch.allclose(optimizer.state[parameter]["exp_avg"], momentum)


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = Tiny()
    optimizer = build_optimizer(_args(optim="muon", weight_decay=0.1), model)
    assert isinstance(optimizer, MuonAdamW)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_algorithm: dict[str, set[str]] = {"muon": set(), "adamw": set()}
    for group in optimizer.param_groups:
        by_algorithm[group["algorithm"]] |= {names[id(parameter)] for parameter in group["params"]}
    assert by_algorithm["muon"] == {"hidden.weight"}
    assert {"embed.weight", "lm_head.weight", "hidden.bias", "ln_1.weight"} <= by_algorithm["adamw"]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # a schedule reaches both
    before = copy.deepcopy(model.state_dict())
    _step(model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# ----------------------------------------------------------------------------------- target modules
@pytest.mark.parametrize(
    ("targets", "name", "expected"),
    [
        ("all-linear", "anything", True),
        ("all_linear", "anything", True),
        (r".*\.mlp\.\d", "h.mlp.3", True),
        (r"mlp", "h.mlp.3", False),
        (["mlp", "attn"], "h.mlp.3", True),
        (["attn"], "h.mlp.3", False),
    ],
)
def test_target_modules_are_names_patterns_or_all(targets: Any, name: str, expected: bool) -> None:
    assert matches(targets, name) is expected
