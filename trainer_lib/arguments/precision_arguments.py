"""Arguments about number formats, memory, and compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer_lib.arguments.fields import arg


@dataclass
class PrecisionArguments:
    """Number formats, memory savings, compilation, kernels."""

    bf16: bool = arg(False, "Compute in bfloat16 where that is safe (mixed precision).", affects="outputs")
    fp16: bool = arg(
        False, "Compute in float16 where that is safe, with loss scaling (mixed precision).", affects="outputs"
    )
    bf16_full_eval: bool = arg(False, "Evaluate with the weights cast to bfloat16.", affects="evaluation")
    fp16_full_eval: bool = arg(False, "Evaluate with the weights cast to float16.", affects="evaluation")
    tf32: bool | None = arg(
        None,
        "Allow TensorFloat-32 in matrix products on NVIDIA cards; torch's own setting when not given.",
        affects="outputs",
    )
    gradient_checkpointing: bool | None = arg(
        None,
        "Recompute activations in the backward pass instead of keeping them: less memory, slower.",
        affects="nothing",
    )
    gradient_checkpointing_kwargs: dict[str, Any] | None = arg(
        None, 'Settings for it, such as {"use_reentrant": false}.', affects="nothing"
    )
    activation_checkpointing: bool | None = arg(None, "Another name of gradient_checkpointing.", affects="nothing")
    activation_checkpointing_kwargs: dict[str, Any] | None = arg(
        None, "Another name of gradient_checkpointing_kwargs.", affects="nothing"
    )
    torch_compile: bool = arg(False, "Compile the model with torch.compile.", affects="outputs")
    torch_compile_backend: str | None = arg(None, "Its backend; giving one switches compilation on.", affects="outputs")
    torch_compile_mode: str | None = arg(None, "Its mode; giving one switches compilation on.", affects="outputs")
    use_liger_kernel: bool = arg(
        False, "Replace layers by the Liger kernels' (needs liger-kernel and a GPU).", affects="outputs"
    )
    liger_kernel_config: dict[str, bool] | None = arg(None, "Which of the Liger kernels to apply.", affects="outputs")
    torch_empty_cache_steps: int | None = arg(
        None,
        "Steps between calls that hand unused device memory back; never when not given.",
        affects="nothing",
        unit="steps",
        ge=1,
    )
    skip_memory_metrics: bool = arg(
        True, "Leave memory figures out of the metrics; measuring them costs time.", affects="nothing"
    )
    use_cache: bool = arg(
        False, "Let the model keep keys and values while training; almost always a waste of memory.", affects="nothing"
    )

    @property
    def mixed_precision(self) -> str:
        """`"bf16"`, `"fp16"` or `"no"`."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"
