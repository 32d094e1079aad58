"""Arguments about sequence-to-sequence models: generation during evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer_lib.arguments.fields import arg


@dataclass
class Seq2SeqArguments:
    """The arguments that `Seq2SeqTrainer` adds."""

    sortish_sampler: bool = arg(
        False, "Sort samples by length with a little randomness, to save padding.", affects="weights"
    )
    predict_with_generate: bool = arg(
        False, "Evaluate on generated sequences instead of on logits.", affects="evaluation"
    )
    generation_max_length: int | None = arg(
        None,
        "Longest generated sequence; the model's own setting when not given.",
        affects="evaluation",
        unit="tokens",
        ge=1,
    )
    generation_num_beams: int | None = arg(
        None,
        "Beams of the beam search; the model's own setting when not given.",
        affects="evaluation",
        unit="beams",
        ge=1,
    )
    generation_config: Any = arg(
        None, "Generation settings: a GenerationConfig, or the name or folder to load one from.", affects="evaluation"
    )
