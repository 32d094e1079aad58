"""Before the first step: how long training is, and the model made ready for it."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trainer_lib.errors import ConfigError, DataError
from trainer_lib.trainer import models
from trainer_lib.trainer.debugging import finite_or_stop
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
        if self.args.use_liger_kernel:
            models.apply_liger_kernels(self.model, self.args.liger_kernel_config)
        if self.args.gradient_checkpointing:
            models.enable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        # Keys and values kept while training are a waste of memory; `train` puts the settings back.
        self._caches = [(config, config.use_cache) for config in models.cache_settings(self.model)]
        for config, _ in self._caches:
            config.use_cache = self.args.use_cache
        self.model_wrapped = self._wrap_model(self.model, training=True)
        if self.optimizer is not None:
            self.strategy.adopt_optimizer(self.optimizer, self.model_wrapped)
        self.model_wrapped.train()
        self._optimizer_mode("train")

    def _put_use_cache_back(self) -> None:
        """The model's configuration as it was before training."""
        for config, before in self._caches:
            config.use_cache = before
        self._caches = []

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The module whose forward is called: compiled and distributed as the arguments say."""
        if not training:
            return model
        if self.args.torch_compile:
            backend = self.args.torch_compile_backend or "inductor"
            compiled: Any = torch.compile(model, backend=backend, mode=self.args.torch_compile_mode)
            return self.strategy.setup_model(compiled)
        return self.strategy.setup_model(model)

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        """What training puts on the model, for its length."""
        noise = self._activate_neftune()
        watched = "underflow_overflow" in (self.args.debug or ())
        try:
            with finite_or_stop(self.model) if watched else contextlib.nullcontext():
                yield
        finally:
            if noise is not None:
                noise.remove()
            self._put_use_cache_back()

    def _activate_neftune(self) -> torch.utils.hooks.RemovableHandle | None:
        if self.args.neftune_noise_alpha is None:
            return None
        embedding = models.input_embedding(self.model, self.args.neftune_noise_alpha)
        return embedding.register_forward_hook(neftune_hook(self.args.neftune_noise_alpha))
