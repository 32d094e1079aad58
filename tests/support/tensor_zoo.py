"""Tensors of every dtype and layout, and the comparison of what comes back with what went in."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_lib.checkpoint.tensors import write_safetensors
from trainer_lib.storage import FileEntry, Store

NAME = "model.safetensors"


def save(store: Store, tensors: dict[str, Tensor]) -> FileEntry:
    with store.open_write(NAME) as writer:
        write_safetensors(writer, tensors)
    return writer.entry


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements in order, whatever its layout."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name


def zoo() -> dict[str, Tensor]:
    """A tensor of every dtype and of every awkward layout; equal at each call."""
    torch.manual_seed(0)
    raw = torch.randint(0, 256, (64,), dtype=torch.uint8)
    dtypes = [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64, torch.int64, torch.uint64, torch.int32, torch.uint32, torch.int16, torch.uint16, torch.int8,
        torch.uint8,
    ]  # fmt: skip
    tensors = {f"dtype.{dtype}": raw.clone().view(dtype) for dtype in dtypes}
    return {
        **tensors,
        "bool": torch.tensor([True, False, True]),
        "zero-dim": torch.tensor(3.5),
        "zero-dim int": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "empty in the middle": torch.empty(3, 0, 2, dtype=torch.int64),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "odd": torch.randn(3, 5, 7),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(10)[::3],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "needs grad": torch.randn(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        'näme with "quotes"/and\\slashes': torch.ones(1),
        "format": torch.ones(2),
    }
