"""`Seq2SeqTrainer`: evaluation and prediction on generated sequences.

Glossary
    generated sequence  what `model.generate` returns for a sample, prompt or decoder start token included
    common length       what generated sequences and labels are padded to, so that batches (and ranks) agree: the limit
                        that generation was given, in tokens
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_lib.arguments import Seq2SeqTrainingArguments, TrainingArguments
from trainer_lib.arguments.seq2seq_arguments import Seq2SeqArguments
from trainer_lib.data.items import batch_size_of
from trainer_lib.data.order import LengthGroupedOrder, Order
from trainer_lib.errors import ConfigError, MissingExtraError
from trainer_lib.outputs import PredictionOutput
from trainer_lib.trainer import Trainer
from trainer_lib.trainer.inspecting import parameters_of, takes

_DEFAULT_NEW_TOKENS = 20  # what transformers generates at most when nothing says how long


class Seq2SeqTrainer(Trainer):
    """A `Trainer` whose evaluations may generate: `Seq2SeqTrainingArguments(predict_with_generate=True)`.

    Works with any model that has `generate(**inputs, **generation arguments) -> tokens [batch, tokens]`, of
    `transformers` or not; inputs that such a method does not take are left out. Predictions are the generated sequences
    and labels, both ``[samples, tokens]``, padded on the right with the pad token (the end-of-sequence token when there
    is none) to the common length; -100 that the collator put into labels stays. Where nothing bounds the length,
    batches of different widths are padded with -100. The loss comes from a forward pass besides, when there are labels.

    Generation settings, strongest first: those of the call (`evaluate(max_length=…, num_beams=…, …)`),
    `generation_max_length` and `generation_num_beams`, `generation_config`, the model's own.

    Raises, besides what `Trainer` does, ConfigError for arguments without generation settings, a model that cannot
    generate, or one whose `generate` does not take what the arguments set.
    """

    _arguments_class = Seq2SeqTrainingArguments
    _serves_seq2seq = True
    args: Seq2SeqTrainingArguments

    def _set_up_process(self, args: TrainingArguments) -> None:
        if not isinstance(args, Seq2SeqArguments):
            raise ConfigError(
                "has no generation settings.",
                field="args",
                value=type(args).__name__,
                remedy="Give Seq2SeqTrainingArguments.",
            )
        super()._set_up_process(args)

    def _look_at_model(self) -> None:
        # Runs for the model given, and for every one that model_init makes later.
        super()._look_at_model()
        if self.args.generation_config is not None:
            self.model.generation_config = self.load_generation_config(self.args.generation_config)
        self._gen_kwargs: dict[str, Any] | None = None  # those of the call under way
        self._check_generation(self._with_defaults({}))

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """The `transformers.GenerationConfig` meant by a name, a folder, a file, a mapping, or one itself (a copy).

        Raises MissingExtraError without transformers; ConfigError when it cannot be loaded or contradicts itself.
        """
        try:
            from transformers import GenerationConfig
        except ImportError:
            raise MissingExtraError(
                "needs the package transformers.", field="generation_config", extra="transformers"
            ) from None
        kind: Any = GenerationConfig
        try:
            if isinstance(gen_config_arg, kind):
                config: Any = copy.deepcopy(gen_config_arg)
            elif isinstance(gen_config_arg, Mapping):
                config = kind(**gen_config_arg)
            elif Path(gen_config_arg).is_file():
                config = kind.from_pretrained(Path(gen_config_arg).parent, Path(gen_config_arg).name)
            else:
                config = kind.from_pretrained(gen_config_arg)
            config.validate(strict=True)
        except (OSError, ValueError, TypeError) as error:
            shown = gen_config_arg if isinstance(gen_config_arg, str | Path) else type(gen_config_arg).__name__
            raise ConfigError(
                f"cannot be used: {' '.join(str(error).split())}",
                field="generation_config",
                value=str(shown),
                remedy="Give a GenerationConfig, or the path of a file or folder that holds one.",
            ) from error
        return config

    # -- data ---------------------------------------------------------------------------------------------------------

    @property
    def _sorts_by_length(self) -> bool:
        return self.args.sortish_sampler or super()._sorts_by_length

    def _train_order(self, dataset: Any) -> Order:
        """With `sortish_sampler`: batches of similar length, in random order."""
        if not self.args.sortish_sampler:
            return super()._train_order(dataset)
        batch = self.get_total_train_batch_size(self.args)
        return LengthGroupedOrder(self._lengths(dataset), self._data_seed, 50 * batch, shuffled_batch=batch)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """`Trainer.evaluate`; `gen_kwargs` (max_length, max_new_tokens, num_beams, …) hold for this call alone."""
        with self._generating(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """`Trainer.predict`; `gen_kwargs` (max_length, max_new_tokens, num_beams, …) hold for this call alone."""
        with self._generating(gen_kwargs):
            return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    @contextlib.contextmanager
    def _generating(self, gen_kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Generation settings for the length of one call. A call inside it (a dict of sets) keeps the outer one's."""
        before = self._gen_kwargs
        try:
            if gen_kwargs or before is None:
                self._gen_kwargs = self._with_defaults(gen_kwargs)
                self._check_generation(self._gen_kwargs)
            yield
        finally:
            self._gen_kwargs = before

    def _with_defaults(self, gen_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the call says, then what the arguments say. None means "not given"."""
        given = {name: value for name, value in gen_kwargs.items() if value is not None}
        if "max_length" not in given and "max_new_tokens" not in given and self.args.generation_max_length is not None:
            given["max_length"] = self.args.generation_max_length
        if "num_beams" not in given and self.args.generation_num_beams is not None:
            given["num_beams"] = self.args.generation_num_beams
        return given

    def _check_generation(self, settings: Mapping[str, Any]) -> None:
        if not self.args.predict_with_generate:
            return
        generate = getattr(self.model, "generate", None)
        if not callable(generate):
            raise ConfigError(
                f"{type(self.model).__name__} has no generate().",
                field="predict_with_generate",
                value=True,
                remedy="Set predict_with_generate=False, or give the model a method generate.",
            )
        for name, value in settings.items():
            if not takes(generate, name):
                raise ConfigError(
                    f"{type(self.model).__name__}.generate does not take it.",
                    field=name,
                    value=value,
                    remedy="Leave it out, or give generate a parameter of that name.",
                )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, generated sequences and labels of one batch; what `Trainer` returns when nothing is generated."""
        if not self.args.predict_with_generate or prediction_loss_only or not isinstance(inputs, Mapping):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        settings = self._with_defaults(gen_kwargs) if gen_kwargs or self._gen_kwargs is None else self._gen_kwargs
        inputs = self._prepare_inputs(inputs)
        tokens, length = self._generate(inputs, settings)
        labels = next((inputs[name] for name in self.label_names if inputs.get(name) is not None), None)
        loss, _, _ = super().prediction_step(model, dict(inputs), True, ignore_keys=ignore_keys)
        if labels is not None and labels.ndim > 1:
            labels = self._pad_tensors_to_max_len(labels, length)
        return loss, self._pad_tensors_to_max_len(tokens, length), labels

    def _generate(self, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
        """Generated sequences ``[batch, tokens]``, and the common length (0 when nothing bounds it)."""
        generate: Any = self.model.generate
        given = self._generation_inputs(inputs, generate)
        for mine, other in (("max_length", "max_new_tokens"), ("max_new_tokens", "max_length")):
            if mine in settings and other not in settings and self._configured(other, {}):
                settings = {**settings, other: None}  # one limit: the call's, not the configuration's
        with torch.no_grad(), self.autocast_smart_context_manager():
            output = generate(**given, **settings)
        tokens = getattr(output, "sequences", output)
        samples = batch_size_of(dict(inputs))
        if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.shape[0] != samples:
            shape = tuple(tokens.shape) if isinstance(tokens, torch.Tensor) else type(tokens).__name__
            raise ConfigError(
                f"returned {shape} for {samples} samples.",
                field="generate",
                remedy="Return one sequence per sample, [batch, tokens] (num_return_sequences=1).",
            )
        return tokens.detach(), self._common_length(given, settings)

    def _generation_inputs(self, inputs: Mapping[str, Any], generate: Any) -> dict[str, Any]:
        """The batch as `generate` takes it: without labels, nor decoder inputs that were made from them."""
        named = parameters_of(generate)
        hidden = {name for name in self.label_names if name not in named}
        labels, prompt = inputs.get("labels"), inputs.get("decoder_input_ids")
        if labels is not None and prompt is not None and labels.shape == prompt.shape:
            hidden |= {"decoder_input_ids", "decoder_attention_mask"}  # else it would continue the padded answer
        given = {name: value for name, value in inputs.items() if name not in hidden}
        main = getattr(self.model, "main_input_name", "input_ids")
        if any(each.kind is each.VAR_KEYWORD for each in named.values()):
            return given
        if len(named) == 1 and main in given and main not in named:
            return {next(iter(named)): given[main]}
        return {name: value for name, value in given.items() if name in named}

    def _common_length(self, given: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
        new, longest = self._configured("max_new_tokens", settings), self._configured("max_length", settings)
        if new is None and longest is not None:
            return longest
        if new is None and getattr(self.model, "generation_config", None) is None:
            return 0
        return self._prompt_length(given) + (_DEFAULT_NEW_TOKENS if new is None else new)

    def _configured(self, name: str, settings: Mapping[str, Any]) -> int | None:
        """A number of tokens as the call says it, else as the generation configuration does."""
        config = settings.get("generation_config") or getattr(self.model, "generation_config", None)
        value = settings[name] if name in settings else getattr(config, name, None)
        return value if isinstance(value, int) else None

    def _prompt_length(self, given: Mapping[str, Any]) -> int:
        """Tokens that a generated sequence begins with: the decoder's prompt or start token, or the whole input."""
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            prompt = given.get("decoder_input_ids")
        else:
            prompt = given.get(getattr(self.model, "main_input_name", "input_ids"))
        return prompt.shape[-1] if isinstance(prompt, torch.Tensor) else 1

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """``tensor [batch, tokens]`` padded on the right to `max_length` tokens; never cut."""
        missing = max_length - tensor.shape[-1]
        return nn.functional.pad(tensor, (0, missing), value=self._pad_token()) if missing > 0 else tensor

    def _pad_token(self) -> int:
        config = getattr(self.model, "config", None)
        for owner in (self.processing_class, getattr(self.model, "generation_config", None), config):
            for name in ("pad_token_id", "eos_token_id"):
                token = getattr(owner, name, None)
                token = token[0] if isinstance(token, list | tuple) and token else token
                if isinstance(token, int):
                    return token
        raise ConfigError(
            "Generated sequences have to be padded, and neither the processing class nor the model's configuration "
            "has a pad or end-of-sequence token.",
            field="pad_token_id",
            remedy="Give a processing_class with pad_token_id, or set it in the model's config.",
        )
