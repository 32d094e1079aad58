"""Everything that the jobs import, for the process that they are forked from; and a job that asks for the GPU.

python -m benchmarks.gpu.imported '{"dry": true}'
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed.checkpoint

_ASKING = ("torchao", "bitsandbytes")  # their imports ask CUDA for the GPU; jobs import them after the fork
_hidden: dict[str, Any] = dict.fromkeys(name for name in _ASKING if name not in sys.modules)
sys.modules.update(_hidden)

from benchmarks.gpu.work import LIBRARIES, device, main, transformers  # noqa: E402 - transformers imports torchao

for _name in ("gpt2", "llama", "t5"):
    importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
for _library in LIBRARIES.values():
    _library.Seq2SeqTrainer, _library.Seq2SeqTrainingArguments  # noqa: B018 - imported when they are first read
for _name in _hidden:
    del sys.modules[_name]


def measure(*, dry: bool) -> dict[str, Any]:
    """Add two numbers on the device."""
    return {"sum": float(torch.ones((), device=device(dry)) + 1), "transformers": transformers.__version__}


if __name__ == "__main__":
    main(measure)
