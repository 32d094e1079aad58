"""Processes have coordinates in a mesh that arguments lay out; the samples follow some of its dimensions."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig
from torch import nn

from trainer_lib import TrainingArguments
from trainer_lib.arguments.configs import parallelism_config
from trainer_lib.errors import ConfigError
from trainer_lib.strategies.tensor.layers import plan_layers
from trainer_lib.worker.process.assembly import arguments


@pytest.mark.parametrize(
    ("sizes", "data", "last"),
    [
        ({"tensor": 4}, [0, 0, 0, 0], "tensor=3"),
        ({"replicate": 2, "tensor": 2}, [0, 0, 1, 1], "tensor=1, replicate=1"),
        ({"tensor": 2, "shard": 2}, [0, 0, 1, 1], "tensor=1, shard=1"),
        ({"replicate": 4, "shard": 1}, [0, 1, 2, 3], "replicate=3"),
        ({"replicate": 2, "shard": 2, "tensor": 2}, [0, 0, 1, 1, 2, 2, 3, 3], "tensor=1, shard=1, replicate=1"),
        ({"shard": 2, "expert": 2}, [0, 1, 2, 3], "expert=1, shard=1"),
        ({"shard": 2, "sequence": 3}, [0, 0, 0, 1, 1, 1], "sequence=2, shard=1"),
        ({}, [0], ""),
    ],
)
def test_ranks_of_one_data_coordinate_are_neighbours(sizes: dict[str, int], data: list[int], last: str) -> None:
    ranks = [parallelism_config.Grid(sizes, rank) for rank in range(len(data))]
    assert [mesh.data_rank for mesh in ranks] == data
    assert {(mesh.size, mesh.data_size) for mesh in ranks} == {(len(data), max(data) + 1)}
    assert ranks[-1].describe() == ranks[0].describe(len(data) - 1) == last
    assert [tuple(mesh.coordinates) for mesh in ranks] == [parallelism_config.DIMENSIONS] * len(data)
    assert len({tuple(mesh.coordinates.values()) for mesh in ranks}) == len(data)


#: (arguments, the mesh of eight processes, the mode of sharding)
LAID_OUT: list[tuple[dict[str, Any], dict[str, int], str | None]] = [
    ({}, {"replicate": 8, "shard": 1}, None),
    ({"fsdp": "full_shard"}, {"shard": 8}, "full_shard"),
    ({"fsdp": "hybrid_shard"}, {"replicate": 2, "shard": 4}, "hybrid_shard"),
    ({"parallelism": {"replicate": 8}}, {"replicate": 8, "shard": 1}, None),
    ({"parallelism": {"shard": 4, "tensor": 2}}, {"shard": 4, "tensor": 2}, "full_shard"),
    ({"parallelism": {"replicate": "4", "tensor": 2}}, {"replicate": 4, "shard": 1, "tensor": 2}, "no_shard"),
    ({"parallelism": {"tensor": 8}}, {"tensor": 8}, "no_shard"),
    ({"parallelism_config": ParallelismConfig(sp_size=8)}, {"sequence": 8}, None),
    ({"parallelism": {"replicate": 4, "sequence": 2}}, {"replicate": 4, "shard": 1, "sequence": 2}, None),
    ({"parallelism_config": {"ep_size": 8}}, {"shard": 1, "expert": 8}, "full_shard"),
    ({"parallelism_config": {"fsdp_size": 8, "ep_size": 4}}, {"shard": 2, "expert": 4}, "full_shard"),
    ({"parallelism": {"replicate": 2, "expert": 4}}, {"replicate": 2, "shard": 1, "expert": 4}, "hybrid_shard"),
    ({"parallelism_config": {"sp_size": 2, "fsdp_size": 4}}, {"shard": 4, "sequence": 2}, "full_shard"),
    ({"parallelism": {"shard": 8}, "fsdp": "shard_grad_op offload"}, {"shard": 8}, "shard_grad_op"),
    (
        {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)},
        {"replicate": 2, "shard": 2, "tensor": 2},
        "hybrid_shard",
    ),
    ({"parallelism_config": {"fsdp_size": 4, "tp_size": 2}}, {"shard": 4, "tensor": 2}, "full_shard"),
]


@pytest.mark.parametrize(("given", "sizes", "mode"), LAID_OUT)
def test_arguments_lay_out_the_processes(given: dict[str, Any], sizes: dict[str, int], mode: str | None) -> None:
    args = TrainingArguments("out", **given)
    assert parallelism_config.mesh_sizes(args, world_size=8, local_world_size=4) == sizes
    assert getattr(parallelism_config.settings_of(args), "mode", None) == mode
    assert parallelism_config.data_size(args, 8) == parallelism_config.Grid(sizes).data_size
    read = TrainingArguments.from_dict(args.to_dict())
    assert (read.parallelism, read.parallelism_config) == (args.parallelism, args.parallelism_config)
    assert parallelism_config.read_layout(read) == parallelism_config.read_layout(args)
    assert parallelism_config.is_laid_out(args, 8) == (parallelism_config.read_layout(args) is not None)
    assert not parallelism_config.is_laid_out(args, 1)
    parallelism_config.check_processes(args, 8)


def test_a_stage_with_other_processes_than_the_layout_has_the_model_whole(tmp_path: Path) -> None:
    request = types.SimpleNamespace(args={"parallelism": {"tensor": 2}, "use_cpu": True}, tracking=None)
    work: Any = types.SimpleNamespace(request=request, recipe=types.SimpleNamespace(collate=None), world_size=1)
    assert arguments(work, "predict", str(tmp_path)).parallelism is None
    work.world_size = 2
    assert arguments(work, "evaluate", str(tmp_path)).parallelism == {"tensor": 2}
    with pytest.raises(ConfigError, match="Its product is 2, and there are 1 processes"):
        parallelism_config.check_processes(arguments(work, "train", str(tmp_path)), 1)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallelism": {"tensr": 2}}, 'parallelism.tensr: No dimension has this name. Did you mean "tensor"'),
    ({"parallelism": {"shard": 0}}, "parallelism.shard = 0: A dimension has at least one process"),
    ({"parallelism": {"sequence": 2, "tensor": 2}}, "parallelism.sequence = 2: .*with tensor. Give shard"),
    ({"parallelism": {"sequence": 2, "expert": 2}}, "parallelism.sequence = 2: .*with expert"),
    ({"parallelism_config": {"fsdp_size": 2, "ep_size": 4}}, "ep_size = 4: .*cannot be grouped .*Give a divisor"),
    ({"parallelism": {"expert": 2}, "fp16": True}, "fp16 = True: .*together with expert"),
    ({"parallelism": {"sequence": 8}, "torch_compile": True}, "torch_compile = True: .*with sequence"),
    ({"parallelism": {"sequence": 8}, "fp8": True, "bf16": True}, "fp8 = tensorwise: .*with sequence"),
    ({"parallelism": {"sequence": 8}, "fsdp": "no_shard"}, "fsdp = no_shard: .*with sequence"),
    ({"parallelism": {"sequence": 2}}, "sequence: 2: Its product is 2, .* Start 2 processes, or give replicate 4"),
    ({"parallelism_config": {"ep_size": 2, "tp_size": 2}}, "parallelism_config.ep_size = 2: .*Remove tensor"),
    ({"parallelism": {"expert": 2}, "fp8": True, "bf16": True}, "fp8 = tensorwise: .*with expert"),
    ({"parallelism": {"expert": 2}}, "expert: 2: Its product is 2, .* give shard 4"),
    ({"parallelism_config": ParallelismConfig(cp_size=2)}, "cp_size = 2: There is no ring attention"),
    ({"parallelism_config": {"pp_size": 2}}, "parallelism_config.pp_size = 2: .*Use tensor inside of a machine"),
    ({"parallelism_config": {"fsdp_cpu_offload": True}}, "fsdp_cpu_offload = True: .*full_shard offload"),
    ({"parallelism_config": 5}, "parallelism_config = 5: This is neither a mapping nor"),
    ({"parallelism": {"tensor": 2}, "parallelism_config": {"tp_size": 4}}, "This contradicts parallelism_config"),
    ({"parallelism": {"tensor": 2, "plan": {"up": "colwis"}}}, 'plan.up = colwis: .*Did you mean "colwise"'),
    ({"parallelism": {"tensor": 2, "plan": "all"}}, "parallelism.plan = all: This is not a plan"),
    ({"parallelism": {"tensor": 2}, "fp16": True}, "fp16 = True: .*Use bf16=True"),
    ({"parallelism": {"tensor": 2}, "torch_compile": True}, "torch_compile = True: .*Remove it"),
    ({"parallelism": {"tensor": 2}, "fsdp": "full_shard"}, "fsdp = full_shard: parallelism has no shards"),
    ({"parallelism": {"shard": 2}, "optim": "adafactor"}, "optim = adafactor: .*with parallelism. It needs every"),
    ({"parallelism": {"shard": 2}, "deepspeed": {"zero_optimization": {"stage": 2}}}, "DeepSpeed lays out"),
    ({"parallelism": {"shard": 2, "tensor": 2}}, "shard: 2, tensor: 2: Its product is 4, .* Start 4 .* give shard 4"),
    ({"parallelism": {"tensor": 16}}, "tensor: 16: Its product is 16, and there are 8 processes. Start 16 processes."),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_cannot_be_laid_out_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        parallelism_config.mesh_sizes(TrainingArguments("out", **given), world_size=8, local_world_size=8)
    assert refused.value.field and refused.value.remedy


class Planned(nn.Module):
    """Two layers, and a plan of its own."""

    def __init__(self, **plan: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.tp_plan = plan


def test_a_plan_names_layers_by_patterns() -> None:
    model = Planned(**{"layers.*.0": "colwise", "layers.*.1": "rowwise", "gone.*": "rowwise"})
    inner = {f"layers.{n}.{k}": style for n in range(2) for k, style in enumerate(("colwise", "rowwise"))}
    assert plan_layers(model, None, 2) == inner
    ends = {"table": "embedding_rowwise", "head": "colwise_gather_output"}
    assert plan_layers(model, ends, 2) == ends
    model.head.weight = model.table.weight
    assert plan_layers(model, ends, 2) == ends
    assert plan_layers(model, {"head": "colwise_gather_output"}, 2) == {}  # its twin stays whole


WRONG_PLANS: list[tuple[dict[str, str], dict[str, str] | None, str]] = [
    ({}, None, "parallelism.plan = none: The model Planned does not say how .*Give patterns"),
    ({"layers.*": "moe_tp_experts"}, None, "parallelism.plan = moe_tp_experts: .*Use shard"),
    ({}, {"layer.*.0": "colwise"}, "matches no module of the model. Its modules are layers"),
    ({}, {"table": "colwise"}, "plan.table = colwise for a Embedding: This style divides layers of the class Linear"),
    ({}, {"layers.*.1": "colwise"}, "parallelism.tensor = 3: The 4 features of layers.0.1 cannot be divided"),
]


@pytest.mark.parametrize(("own", "given", "message"), WRONG_PLANS)
def test_a_plan_that_does_not_fit_is_refused(own: dict[str, str], given: dict[str, str] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        plan_layers(Planned(**own), given, 3)
    assert refused.value.field and refused.value.remedy
