"""`Seq2SeqTrainer`: evaluation and prediction on generated sequences.

Glossary
    generated sequence  what `model.generate` returns for a sample, prompt or decoder start token included
    common length       what generated sequences and labels are padded to, so that batches (and ranks) agree: the limit
                        of generation, in tokens
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from trainer_lib.arguments import Seq2SeqTrainingArguments
from trainer_lib.base.outputs import PredictionOutput
from trainer_lib.data.loading.items import batch_size_of
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.trainer import Trainer
from trainer_lib.trainer.model.models import refuse_names
from trainer_lib.trainer.overrides import parameters_of, takes

_DEFAULT_NEW_TOKENS = 20  # the limit of transformers when nothing else sets one


class Seq2SeqTrainer(Trainer):
    """A `Trainer` whose evaluations may generate: `Seq2SeqTrainingArguments(predict_with_generate=True)`.

    Works with any model that has `generate(**inputs, **generation arguments) -> tokens [batch, tokens]`, of
    `transformers` or not; inputs that such a method does not take are left out. Predictions are the generated sequences
    and labels, both ``[samples, tokens]``, padded on the right with the pad token (the end-of-sequence token when there
    is none) to the common length; -100 that the collator put into labels stays. Where nothing bounds the length,
    batches of different widths are padded with -100. The loss comes from a forward pass besides, when there are labels.

    Generation settings, strongest first: those of the call (`evaluate(max_length=…, num_beams=…, …)`),
    `generation_max_length` and `generation_num_beams`, `generation_config`, the model's own.

    Raises:
        ConfigError: the arguments have no generation settings, the model cannot generate, or its `generate` does not
            take what the arguments set. Further errors are those of `Trainer`.
    """

    _trainflow_arguments_class = Seq2SeqTrainingArguments
    _trainflow_generation: Generation
    args: Seq2SeqTrainingArguments
    _gen_kwargs: dict[str, Any] | None

    @override
    def _trainflow_look_at_model(self) -> None:
        super()._trainflow_look_at_model()
        if self.args.generation_config is not None:
            self.model.generation_config = self.load_generation_config(self.args.generation_config)
        self._trainflow_generation = Generation(self)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """The `transformers.GenerationConfig` of a name, a folder, a file or a mapping; of another one, a copy.

        Raises:
            MissingExtraError: transformers is not installed.
            ConfigError: the settings cannot be loaded, or contradict each other.
        """
        try:
            from transformers import GenerationConfig
        except ImportError:
            what = "Generation settings need the package transformers."
            raise MissingExtraError(what, field="generation_config", extra="transformers") from None
        kind: Any = GenerationConfig
        try:
            if isinstance(gen_config_arg, kind):
                config: Any = copy.deepcopy(gen_config_arg)
            elif isinstance(gen_config_arg, Mapping):
                refuse_names(gen_config_arg, kind(), field="generation_config")
                config = kind(**gen_config_arg)
            elif Path(gen_config_arg).is_file():
                config = kind.from_pretrained(Path(gen_config_arg).parent, Path(gen_config_arg).name)
            else:
                config = kind.from_pretrained(gen_config_arg)
            config.validate(strict=True)
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError) as error:
            shown = gen_config_arg if isinstance(gen_config_arg, str | Path) else type(gen_config_arg).__name__
            what = f"The generation settings cannot be used: {' '.join(str(error).split())}"
            remedy = "Give a GenerationConfig, or the path of a file or folder that holds one."
            raise ConfigError(what, field="generation_config", value=str(shown), remedy=remedy) from error
        return config

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """`Trainer.evaluate`; `gen_kwargs` (max_length, max_new_tokens, num_beams, …) hold for this call alone."""
        with self._trainflow_generation.use_settings(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """`Trainer.predict`; `gen_kwargs` (max_length, max_new_tokens, num_beams, …) hold for this call alone."""
        with self._trainflow_generation.use_settings(gen_kwargs):
            return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss ``[]``, generated sequences ``[batch, tokens]`` and labels; without generation, those of `Trainer`."""
        if not self.args.predict_with_generate or prediction_loss_only or not isinstance(inputs, Mapping):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        generation = self._trainflow_generation
        # None outside of `evaluate` and `predict`: a subclass may call this method alone, or set them by itself.
        settings = generation.complete_settings(gen_kwargs or self._gen_kwargs or {})
        inputs = self._prepare_inputs(inputs)
        tokens, length = generation.generate(inputs, settings)
        labels = next((inputs[name] for name in self.label_names if inputs.get(name) is not None), None)
        loss = None
        if labels is not None:  # a second forward, for the loss alone: generation does not compute it
            loss, _, _ = super().prediction_step(model, dict(inputs), True, ignore_keys=ignore_keys)
        # One label per sample has no length to pad.
        if labels is not None and labels.ndim > 1:
            labels = self._pad_tensors_to_max_len(labels, length)
        return loss, self._pad_tensors_to_max_len(tokens, length), labels

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """Pad `tensor` ``[batch, tokens]`` on the right to ``[batch, max_length]``; a longer one is not cut."""
        missing = max_length - tensor.shape[-1]
        if missing <= 0:
            return tensor
        return nn.functional.pad(tensor, (0, missing), value=self._trainflow_generation.find_pad_token())


class Generation:
    """The generation settings of one `Seq2SeqTrainer`, and sequences generated with them.

    It is the writer of the Trainer's `_gen_kwargs`, the settings of the call under way.
    """

    def __init__(self, trainer: Seq2SeqTrainer) -> None:
        self._trainer = trainer
        trainer._gen_kwargs = None
        self.refuse_unusable(self.complete_settings({}))

    @contextlib.contextmanager
    def use_settings(self, gen_kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Use these settings for one call. A call inside it (one of a dict of sets) keeps those of the outer call."""
        before = self._trainer._gen_kwargs
        try:
            if gen_kwargs or before is None:
                # Checked before the evaluation starts, and not at its first batch.
                self._trainer._gen_kwargs = self.complete_settings(gen_kwargs)
                self.refuse_unusable(self._trainer._gen_kwargs)
            yield
        finally:
            self._trainer._gen_kwargs = before

    def complete_settings(self, gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a call, completed by those of the arguments; None counts as not given."""
        given = {name: value for name, value in gen_kwargs.items() if value is not None}
        longest, beams = self._trainer.args.generation_max_length, self._trainer.args.generation_num_beams
        if longest is not None and "max_new_tokens" not in given:
            given.setdefault("max_length", longest)
        if beams is not None:
            given.setdefault("num_beams", beams)
        if self._trainer._trainflow.engine.strategy.forward_communicates:
            given["synced_gpus"] = True  # a process whose sequences have ended computes on until all have
        return given

    def refuse_unusable(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError when the model cannot generate, or not with these settings."""
        if not self._trainer.args.predict_with_generate:
            return
        generate = getattr(self._trainer.model, "generate", None)
        if not callable(generate):
            what = f"{type(self._trainer.model).__name__} has no generate()."
            remedy = "Set predict_with_generate=False, or give the model a method generate."
            raise ConfigError(what, field="predict_with_generate", value=True, remedy=remedy)
        for name, value in settings.items():
            if not takes(generate, name):
                what = f"{type(self._trainer.model).__name__}.generate does not take this setting."
                remedy = "Leave it out, or give generate a parameter of that name."
                raise ConfigError(what, field=name, value=value, remedy=remedy)

    def generate(self, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        """Generated sequences ``[batch, tokens]``, and the common length (0 when nothing bounds it)."""
        generate: Any = self._trainer.model.generate
        given = self._generation_inputs(inputs, generate)
        for mine, other in (("max_length", "max_new_tokens"), ("max_new_tokens", "max_length")):
            if mine in settings and other not in settings and self._configured(other, {}):
                settings = {**settings, other: None}  # one limit: the call's, not the configuration's

        def compute() -> Any:
            with self._trainer.autocast_smart_context_manager():
                return generate(**given, **settings)

        output = self._trainer._trainflow.forward.without_gradients(compute)
        # With return_dict_in_generate the tokens are an attribute.
        tokens = getattr(output, "sequences", output)
        samples = batch_size_of(dict(inputs))
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.shape[0] != samples:
            shape = tuple(tokens.shape) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            what = f"The model's generate returned {shape} for {samples} samples."
            remedy = "Return one sequence per sample, [batch, tokens] (num_return_sequences=1)."
            raise ConfigError(what, field="generate", remedy=remedy)
        return tokens.detach(), self._common_length(given, settings)

    def _generation_inputs(self, inputs: Mapping[str, Any], generate: Any) -> dict[str, Any]:
        """The batch as `generate` takes it: without labels, and without decoder inputs that were made from them."""
        named = parameters_of(generate)
        hidden = {name for name in self._trainer.label_names if name not in named}
        labels, prompt = inputs.get("labels"), inputs.get("decoder_input_ids")
        if labels is not None and prompt is not None and labels.shape == prompt.shape:
            hidden |= {"decoder_input_ids", "decoder_attention_mask"}  # else it would continue the padded answer
        given = {name: value for name, value in inputs.items() if name not in hidden}
        main = getattr(self._trainer.model, "main_input_name", "input_ids")
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
            return given
        # A generate(x) of a plain module: its one parameter is the main input, whatever its name.
        if len(named) == 1 and main in given and main not in named:
            return {next(iter(named)): given[main]}
        return {name: value for name, value in given.items() if name in named}

    def _common_length(self, given: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
        new, longest = self._configured("max_new_tokens", settings), self._configured("max_length", settings)
        if new is None and longest is not None:
            return longest
        if new is None and getattr(self._trainer.model, "generation_config", None) is None:
            return 0
        # Before the generated tokens: the decoder's prompt or start token, or the whole input.
        is_decoder = getattr(getattr(self._trainer.model, "config", None), "is_encoder_decoder", False)
        name = "decoder_input_ids" if is_decoder else getattr(self._trainer.model, "main_input_name", "input_ids")
        prompt = given.get(name)
        before = prompt.shape[-1] if isinstance(prompt, torch.Tensor) else 1
        return before + (_DEFAULT_NEW_TOKENS if new is None else new)

    def _configured(self, name: str, settings: Mapping[str, Any]) -> int | None:
        """A number of tokens that the call sets, else the generation configuration."""
        config = settings.get("generation_config") or getattr(self._trainer.model, "generation_config", None)
        value = settings[name] if name in settings else getattr(config, name, None)
        return value if isinstance(value, int) else None

    def find_pad_token(self) -> int:
        """The token that fills short sequences. Raises ConfigError when none is configured."""
        config = getattr(self._trainer.model, "config", None)
        for owner in (self._trainer.processing_class, getattr(self._trainer.model, "generation_config", None), config):
            for name in ("pad_token_id", "eos_token_id"):
                token = getattr(owner, name, None)
                # Some models list several end-of-sequence tokens.
                token = token[0] if isinstance(token, list | tuple) and token else token
                if isinstance(token, int):
                    return token
        raise ConfigError(
            "Generated sequences have to be padded, and neither the processing class nor the model's configuration "
            "has a pad or end-of-sequence token.",
            field="pad_token_id",
            remedy="Give a processing_class with pad_token_id, or set it in the model's config.",
        )
