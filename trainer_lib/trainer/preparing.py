"""Before the first step: how long training is, and the model made ready for it."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import nn

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.trainer.losses import neftune_hook
from trainer_lib.trainer.optimization import OptimizationMixin
from trainer_lib.trainer.seeding import enable_full_determinism, set_seed


class PreparingMixin(OptimizationMixin):
    """Length and model."""

    def _length(self, steps_per_epoch: int | None) -> tuple[int, int]:
        """(optimizer steps, epochs) to do."""
        args = self.args
        if args.max_steps > 0:
            epochs = sys.maxsize if not steps_per_epoch else -(-args.max_steps // steps_per_epoch)
            return args.max_steps, epochs
        if steps_per_epoch is None:
            raise ConfigError(
                "The training data has no length, so the number of steps cannot follow from num_train_epochs.",
                field="max_steps",
                value=args.max_steps,
                remedy="Give max_steps.",
            )
        if steps_per_epoch == 0:
            raise DataError("The training data has no batch.", field="train_dataset", remedy="Give more data.")
        return math.ceil(args.num_train_epochs * steps_per_epoch), math.ceil(args.num_train_epochs)

    def _reinitialise_model(self, trial: Any) -> None:
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)
        self.model = self.call_model_init(trial)
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.device)
        self._look_at_model()

    def _prepare_model(self) -> None:
        if self.args.gradient_checkpointing:
            enable = getattr(self.model, "gradient_checkpointing_enable", None)
            if not callable(enable):
                raise ConfigError(
                    "The model has no gradient_checkpointing_enable().",
                    field="gradient_checkpointing",
                    value=True,
                    remedy="Add one, or use torch.utils.checkpoint inside the model.",
                )
            enable(gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs or {"use_reentrant": False})
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = self.args.use_cache  # keys and values kept while training are a waste of memory
        self.model_wrapped = self._wrap_model(self.model, training=True)
        self.model_wrapped.train()
        self._optimizer_mode("train")

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The module whose forward is called: compiled and distributed as the arguments say."""
        if not training:
            return model
        if self.args.torch_compile:
            backend = self.args.torch_compile_backend or "inductor"
            compiled: Any = torch.compile(model, backend=backend, mode=self.args.torch_compile_mode)
            return self.strategy.setup_model(compiled)
        return self.strategy.setup_model(model)

    def _activate_neftune(self) -> torch.utils.hooks.RemovableHandle | None:
        if self.args.neftune_noise_alpha is None:
            return None
        get = getattr(self.model, "get_input_embeddings", None)
        embedding = (
            get() if callable(get) else next((m for m in self.model.modules() if isinstance(m, nn.Embedding)), None)
        )
        if not isinstance(embedding, nn.Module):
            raise ConfigError(
                "The model has no embedding to add noise to.",
                field="neftune_noise_alpha",
                value=self.args.neftune_noise_alpha,
                remedy="Remove it, or give the model get_input_embeddings().",
            )
        return embedding.register_forward_hook(neftune_hook(self.args.neftune_noise_alpha))
