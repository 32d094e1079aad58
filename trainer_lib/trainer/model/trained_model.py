"""`TrainedModel`: the user's model, from the moment it is given until training puts its settings back."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib.arguments import TrainingArguments
from trainer_lib.data.loading.collators import IGNORED
from trainer_lib.distributed.precision import use_float8
from trainer_lib.errors import ConfigError, NonFiniteError
from trainer_lib.evaluation import nested
from trainer_lib.strategies.recomputation import Recomputation, save_memory
from trainer_lib.trainer.model import models
from trainer_lib.trainer.model.models import ModelFacts
from trainer_lib.trainer.model.seeding import enable_full_determinism, set_seed

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer

_log = logging.getLogger(__name__)
FRAMES = 21  # modules that `debug="underflow_overflow"` shows, the faulty one included: as many as the reference


@contextlib.contextmanager
def finite_or_stop(model: nn.Module) -> Iterator[None]:
    """Check every forward of `model` inside the block; the host waits at every module. Raises NonFiniteError."""
    frames: deque[str] = deque(maxlen=FRAMES)
    hooks = [
        module.register_forward_hook(functools.partial(_look, name or "the model", frames), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _look(name: str, frames: deque[str], module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    parts: dict[str, list[torch.Tensor]] = {
        # Its own weights: the modules inside it have been looked at before it.
        "weights": [param.detach() for param in module.parameters(recurse=False)],
        "input": _floats([*args, *kwargs.values()]),
        "output": _floats(output),
    }
    lines, faulty = [f"{name} ({type(module).__name__})"], ""
    for what, tensors in parts.items():
        for tensor in tensors:
            low, high = tensor.float().abs().aminmax() if tensor.numel() else (0.0, 0.0)
            lines.append(f"  {what:8} {float(low):9.2e} {float(high):9.2e}  {tuple(tensor.shape)}")
            faulty = faulty or ("" if bool(torch.isfinite(tensor).all()) else what)
    frames.append("\n".join(lines))
    if not faulty:
        return
    shown = "least and greatest magnitude of every module before it, oldest first:\n" + "\n".join(frames)
    _log.error("%s of %s (%s) is not finite; %s", faulty, name, type(module).__name__, shown)
    what = f"The first value that is not finite is in the {faulty} of {name} ({type(module).__name__})."
    remedy = "Look at the modules before it in the log: where do magnitudes grow? bf16 has more range than fp16."
    raise NonFiniteError(what, field="debug", value="underflow_overflow", remedy=remedy, details=shown)


def _floats(tree: Any) -> list[torch.Tensor]:
    found: list[Any] = []
    nested.map_tree(found.append, tree)
    return [leaf.detach() for leaf in found if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


class TrainedModel:
    """Owner of the Trainer's `model`, and of what is read off it: labels, smoothing, placement."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self._trainer = trainer
        self._internals = internals
        self._caches: list[tuple[Any, Any]] = []
        self._noise: torch.utils.hooks.RemovableHandle | None = None
        self._recomputation = contextlib.ExitStack()  # of blocks; closing it ends it
        trainer.is_model_parallel = False

    def take(self, given: nn.Module | None) -> None:
        """Adopt the given model, or a new one from `model_init`, and move it to the device."""
        trainer, strategy = self._trainer, self._internals.engine.strategy
        if given is None and trainer.model_init is None:
            raise ConfigError("Neither was given.", field="model or model_init", remedy="Give one of them.")
        if given is not None and trainer.model_init is not None:
            raise ConfigError("Both were given.", field="model and model_init", remedy="Give one of them.")
        model = trainer.call_model_init() if given is None else given
        if not isinstance(model, nn.Module):
            raise ConfigError(
                "The model is not a torch.nn.Module.",
                field="model",
                value=type(model).__name__,
                remedy="Give a module.",
            )
        models.refuse_untrainable(model)
        models.keep_layout(model)
        trainer.is_model_parallel = models.is_spread(model, self._internals.world.device)
        stays = trainer.is_model_parallel or models.is_placed(model) or strategy.places_model
        # A model that was placed stays there: the parts of a spread one must not move to one device.
        trainer.place_model_on_device = trainer.args.place_model_on_device and not stays
        self.use(model)
        self._place()
        self._internals.engine.use_wrapped(model)
        trainer._trainflow_look_at_model()

    def use(self, model: nn.Module) -> None:
        """Make `model` the Trainer's."""
        self._trainer.model = model

    def _place(self) -> None:
        trainer = self._trainer
        if trainer.place_model_on_device:
            trainer._move_model_to_device(trainer.model, self._internals.world.device)

    def initialize_again(self, trial: Any) -> None:
        """Replace the model by a new one from `model_init`, with the weights that the seed fixes."""
        trainer = self._trainer
        (enable_full_determinism if trainer.args.full_determinism else set_seed)(trainer.args.seed)
        self.use(trainer.call_model_init(trial))
        self._place()
        trainer._trainflow_look_at_model()

    def look(self) -> None:
        """Find the facts about the model. Raises ConfigError for a model that cannot be trained as asked."""
        trainer, strategy, args = self._trainer, self._internals.engine.strategy, self._trainer.args
        facts = self._internals.facts = ModelFacts(trainer.model, args.label_names, strategy.numel)
        trainer.label_names = list(facts.labels)
        trainer.can_return_loss = facts.returns_loss
        models.check_settings(trainer.model, args)
        if args.fp8:  # here, since a strategy that shards holds on to the layers that it finds
            use_float8(trainer.model, args)
        strategy.check_model(trainer.model)
        problem = getattr(getattr(trainer.model, "config", None), "problem_type", None)
        if trainer.label_smoother is not None and problem == "multi_label_classification":
            _log.warning(
                "label_smoothing_factor is ignored: it needs single-label targets, and this model is multi-label."
            )
            trainer.label_smoother = None

    def set_up_smoothing(self, args: TrainingArguments) -> None:
        """Make the label smoother that the arguments ask for."""
        factor = args.label_smoothing_factor
        self._trainer.label_smoother = LabelSmoother(factor) if factor > 0 else None

    def prepare(self) -> None:
        """Set kernels, recomputation and caching for training."""
        model, args = self._trainer.model, self._trainer.args
        if args.use_liger_kernel:
            config = args.liger_kernel_config
            kernels = models.liger_kernels(model, config)
            kernels._apply_liger_kernel_to_instance(model=models.innermost(model), **(config or {}))
        if args.gradient_checkpointing:
            choice = Recomputation.of(args.gradient_checkpointing_kwargs)
            self._recomputation.close()
            if choice is None:
                models.enable_gradient_checkpointing(model, args.gradient_checkpointing_kwargs)
            else:
                self._recomputation.callback(save_memory(model, choice))
        # Keeping keys and values wastes memory in training. `hooked` puts the settings back.
        own: Any = getattr(model, "config", None)
        parts: tuple[Any, ...] = (own, getattr(own, "text_config", None))
        self._caches = [(part, part.use_cache) for part in parts if hasattr(part, "use_cache")]
        for part, _ in self._caches:
            part.use_cache = args.use_cache

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Put on the model what training needs, and take it off at the end."""
        self.add_noise(self._trainer.model)
        watched = "underflow_overflow" in (self._trainer.args.debug or ())
        try:
            # The training in this block calls `prepare`, which fills `_caches`.
            with finite_or_stop(self._trainer.model) if watched else contextlib.nullcontext():
                yield
        finally:
            self.remove_noise()
            self._recomputation.close()
            for config, before in self._caches:
                config.use_cache = before
            self._caches = []

    def add_noise(self, model: nn.Module) -> None:
        """Put the noise of NEFTune on a model's embedding, if the arguments ask for it and none is there."""
        alpha = self._trainer.neftune_noise_alpha
        if alpha is not None and self._noise is None:
            hook = functools.partial(_add_noise, alpha)
            self._noise = models.input_embedding(model, alpha).register_forward_hook(hook)

    def remove_noise(self) -> None:
        """Take the noise of NEFTune off."""
        if self._noise is not None:
            self._noise.remove()
        self._noise = None

    @contextlib.contextmanager
    def use_cache_as_given(self) -> Iterator[None]:
        """Inside, `use_cache` is what it was before training: that is what a saved configuration should say."""
        in_training = [(config, config.use_cache) for config, _ in self._caches]
        for config, before in self._caches:
            config.use_cache = before
        try:
            yield
        finally:
            for config, value in in_training:
                config.use_cache = value


class LabelSmoother:
    """Label-smoothed cross-entropy over the logits, mean over the labels that are not -100.

    Source: Szegedy et al., "Rethinking the Inception Architecture" (2016), section 7.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def __call__(
        self,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        cross_entropy: Callable[..., torch.Tensor] = nn.functional.cross_entropy,
    ) -> torch.Tensor:
        """The loss, 0-dim, of ``logits [..., classes]`` against ``labels [...]``.

        Args:
            model_output: the model's outputs; logits under "logits", or first.
            labels: target classes; -100 is ignored.
            shift_labels: position t is compared with label t + 1.
            num_items_in_batch: the sum of the losses is divided by this number; else by the number of labels.
            cross_entropy: torch's, or one over logits that are divided over processes.
        """
        logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        flat = logits.reshape(-1, logits.shape[-1])
        # In float32: in 16 bits, a sum over tens of thousands of classes loses its last digits.
        loss = cross_entropy(
            *(flat.float(), labels.reshape(-1)),
            ignore_index=IGNORED,
            label_smoothing=self.epsilon,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _add_noise(alpha: float, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook that adds uniform noise to an embedding ``[..., tokens, width]`` while training.

    Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (https://arxiv.org/abs/2310.05914).
    """
    if not module.training:
        return output
    bound = alpha / (output.shape[-2] * output.shape[-1]) ** 0.5  # alpha / sqrt(tokens * width)
    return output + torch.zeros_like(output).uniform_(-bound, bound)
