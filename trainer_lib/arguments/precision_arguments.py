"""Arguments about number formats, memory, and compilation."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_lib.arguments.fields import Settings, arg


@dataclass
class PrecisionArguments:
    """Number formats, memory savings, compilation, kernels."""

    # In both keys: an evaluation computes in this format, too.
    bf16: bool = arg(False, "Compute in bfloat16 where that is safe (mixed precision).", affects="outputs")
    fp16: bool = arg(
        False, "Compute in float16 where that is safe, with loss scaling (mixed precision).", affects="outputs"
    )
    bf16_full_eval: bool = arg(False, "Evaluate with the weights cast to bfloat16.", affects="evaluation")
    fp16_full_eval: bool = arg(False, "Evaluate with the weights cast to float16.", affects="evaluation")
    tf32: bool | None = arg(
        None,
        "Allow TensorFloat-32 in matrix products on NVIDIA GPUs; torch's own setting when not given.",
        affects="outputs",
    )
    # Not in a key: recomputed activations have the same values.
    gradient_checkpointing: bool | None = arg(
        None,
        "Recompute activations in the backward pass instead of keeping them; this saves memory and costs time.",
        affects="nothing",
        bare=True,
    )
    gradient_checkpointing_kwargs: Settings = arg(
        None, 'Settings of gradient_checkpointing, such as {"use_reentrant": false}.', affects="nothing"
    )
    # The newer name of the two; `validation` keeps them equal.
    activation_checkpointing: bool | None = arg(
        None, "Another name of gradient_checkpointing.", affects="nothing", bare=True
    )
    activation_checkpointing_kwargs: Settings = arg(
        None, "Another name of gradient_checkpointing_kwargs.", affects="nothing"
    )
    torch_compile: bool = arg(False, "Compile the model with torch.compile.", affects="outputs")
    torch_compile_backend: str | None = arg(
        None, "Backend of torch.compile; giving one turns torch_compile on.", affects="outputs"
    )
    torch_compile_mode: str | None = arg(
        None, "Mode of torch.compile; giving one turns torch_compile on.", affects="outputs"
    )
    use_liger_kernel: bool = arg(
        False, "Replace layers by those of the Liger kernels (needs liger-kernel and a GPU).", affects="outputs"
    )
    liger_kernel_config: dict[str, bool] | None = arg(None, "The Liger kernels to apply, by name.", affects="outputs")
    torch_empty_cache_steps: int | None = arg(
        None,
        "Steps between calls that release unused device memory; no calls when not given.",
        affects="nothing",
        unit="steps",
        ge=1,
    )
    skip_memory_metrics: bool = arg(
        True, "Leave memory use out of the metrics; measuring it costs time.", affects="nothing"
    )
    use_cache: bool = arg(
        False,
        "Let the model keep keys and values during training, which only wastes memory in most cases.",
        affects="nothing",
    )

    @property
    def mixed_precision(self) -> str:
        """The number format of mixed precision: `"bf16"`, `"fp16"` or `"no"`."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"
