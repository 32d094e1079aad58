"""Models of transformers: by name, from a folder, or at random from a configuration; with LoRA adapters on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError, MissingExtraError, first_line
from trainer_lib.recipes.option_names import choose
from trainer_lib.recipes.targets import head_settings

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo

FIELD = "train.model"
MODEL: dict[str, Any] = {
    "pretrained": None,  # name of the model on the Hub
    "folder": None,  # or its folder
    "config": {},  # or the configuration of one with weights at random
    "lora": {},  # train adapters of this form (and a new head) in place of all weights
}
"""The settings of `build_model` (`train.model`) for a model of transformers, with their defaults."""
LORA: dict[str, Any] = {
    "r": 8,  # rank
    "alpha": 16,  # the scale is alpha / r
    "dropout": 0.0,
    "target_modules": None,  # layers that get an adapter; None: all linear ones but the head
    "modules_to_save": [],  # layers that are trained as a whole
}
"""The settings of adapters, with their defaults."""
DTYPES = ("float32", "bfloat16", "float16", "auto")
"""Types of a loaded model's weights."""
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Tokens that a model at random takes from its tokenizer."""
_WITH_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
_HEADS = r"(.*\.)?(classifier|score|qa_outputs)(\..*)?"


def one_of(options: Mapping[str, Any], *, field: str) -> str | None:
    """The model by its name or folder; None where neither is given. Raises ConfigError for both, or a `config`."""
    given = [str(options[name]) for name in ("pretrained", "folder") if options[name] is not None]
    if len(given) > 1:
        what = "A model has a name or a folder, and not both."
        raise ConfigError(what, field=f"{field}.folder", value=given[1], remedy="Remove one of them.")
    if given and options.get("config"):
        what = "A model that is loaded has its own configuration."
        raise ConfigError(what, field=f"{field}.config", value=options["config"], remedy="Remove it.")
    return given[0] if given else None


def import_transformers() -> Any:
    """The package transformers. Raises MissingExtraError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("This recipe needs transformers.", extra="transformers") from error
    return transformers


def from_place(kind: str, place: str, *, field: str, **settings: Any) -> Any:
    """Load a model, configuration or tokenizer by a class of transformers, such as "AutoConfig", from a name or folder.

    Raises:
        ConfigError: transformers cannot load it; `field` is the setting that names the model.
    """
    automatic = getattr(import_transformers(), kind)
    try:
        return automatic.from_pretrained(place, **settings)
    except (OSError, ValueError) as error:
        raise no_model(place, error, field=field) from error


def no_model(place: str, error: Exception, *, field: str) -> ConfigError:
    """The error for a model that transformers cannot load."""
    return ConfigError(
        f"transformers cannot load this model: {str(error).splitlines()[0]}",
        field=field,
        value=place,
        remedy="Check the name; without a network, give the folder of a model (folder: PATH), or none, for a new one.",
    )


def new_config(settings: Mapping[str, Any], own: Mapping[str, Any], *, field: str) -> Any:
    """A configuration of transformers for a model at random; the user gave its settings `own`, in `field`.

    Raises:
        ConfigError: there is no such type of model, or no such setting, which transformers would keep without a word.
    """
    from trainer_lib.trainer.model.models import refuse_names

    library, kind = import_transformers(), str(settings["model_type"])
    if kind not in library.CONFIG_MAPPING:
        remedy = suggestion(kind, library.CONFIG_MAPPING, listing=False)
        raise ConfigError("transformers has no such model.", field=f"{field}.model_type", value=kind, remedy=remedy)
    refuse_names(own, library.AutoConfig.for_model(kind), field=field)
    return library.AutoConfig.for_model(**settings)


# -- models with a head -----------------------------------------------------------------------------------------------
def small_bert() -> dict[str, Any]:
    """The encoder that is built at random where `config` says nothing else."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"model_type": "bert", **sizes}


def build_with_head(
    chosen: Mapping[str, Any],
    data: DataInfo,
    *,
    head: str,
    task: str,
    small: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Build a model that reads the data's tokens.

    Args:
        chosen: the settings of `MODEL`, and perhaps `new_head`: the head may have another shape.
        data: the `vocabulary` and `pad_token_id` of its tokenizer.
        head: the end of the name of its class, "ForQuestionAnswering"; empty for a model without a head.
        task: peft's name for its use.
        small: the configuration of a model at random, where `config` says nothing else; None: `small_bert`.
        settings: of its configuration.

    Raises:
        ConfigError: transformers cannot load it.
    """
    place = one_of(chosen, field=FIELD)
    if place is None:
        given = {"vocab_size": data.info["vocabulary"], "pad_token_id": data.info["pad_token_id"], **settings}
        usual = small_bert() if small is None else small
        config = new_config({**usual, **chosen["config"], **given}, chosen["config"], field=f"{FIELD}.config")
        model: nn.Module = getattr(import_transformers(), f"AutoModel{head}").from_config(config)
    else:
        settings["ignore_mismatched_sizes"] = chosen.get("new_head", False)
        model = from_place(f"AutoModel{head}", place, field=FIELD, **settings)
    return add_adapters(model, chosen["lora"], place=place, task=task)


def build_classifier(options: Mapping[str, Any], data: DataInfo, *, head: str, task: str) -> nn.Module:
    """Build a model for the labels of the data; arguments as of `build_with_head`.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    chosen = choose(options, {**MODEL, "new_head": False}, field=FIELD)
    place, settings = one_of(chosen, field=FIELD), head_settings(data.info)
    if place is not None:
        require_head(place, head, len(settings["id2label"]), is_new=chosen["new_head"])
    model: nn.Module = build_with_head(chosen, data, head=head, task=task, **settings)
    return model


def require_head(place: str, head: str, classes: int, *, is_new: bool, has_head: bool = False) -> None:
    """Raise ConfigError for a head of another number of classes, unless a new one is asked for."""
    config = from_place("AutoConfig", place, field=FIELD)
    has_head = has_head or any(head in name for name in config.architectures or ())
    if has_head and config.num_labels != classes and not is_new:
        raise ConfigError(
            f"The model's head knows {config.num_labels} classes, and the data has {classes}.",
            field=f"{FIELD}.new_head",
            value=False,
            remedy="Set train.model.new_head=true: the head then begins at random.",
        )


# -- models that continue texts ---------------------------------------------------------------------------------------
def new_causal_model(
    config: Mapping[str, Any], *, length: int, vocabulary: int, ends: Mapping[str, Any], field: str = FIELD
) -> Any:
    """A model with weights at random, for rows of `length` tokens; `field` holds its `config`."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    given = {"max_position_embeddings": length, "vocab_size": vocabulary, **ends}
    made = new_config({"model_type": "llama", **sizes, **given, **config}, config, field=f"{field}.config")
    return import_transformers().AutoModelForCausalLM.from_config(made)


def load_causal_model(place: str, *, dtype: str, vocabulary: int, field: str) -> Any:
    """The model of this name or folder, with weights of one of `DTYPES`.

    Raises:
        ConfigError: transformers cannot load it, or it does not know all tokens of the data's `vocabulary`.
    """
    model = from_place("AutoModelForCausalLM", place, field=field, dtype=dtype)
    known = model.get_input_embeddings().num_embeddings
    if known < vocabulary:
        what = f"The model knows {known:,} tokens, and the tokenizer of the data has {vocabulary:,}."
        remedy = "Name one model in train.model and in prepare.options."
        raise ConfigError(what, field=field, value=place, remedy=remedy)
    return model


def require_positions(place: str, length: int, *, field: str) -> None:
    """Raise ConfigError for rows of more tokens than the model says that it reads."""
    try:
        config = import_transformers().AutoConfig.from_pretrained(place)
    except (OSError, ValueError):
        return  # a tokenizer may be alone in its folder
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and length > most:
        what = f"The model reads at most {most:,} tokens."
        raise ConfigError(what, field=field, value=length, remedy=f"Give at most {most}.")


# -- adapters ---------------------------------------------------------------------------------------------------------
def add_adapters(
    model: Any,
    options: Mapping[str, Any],
    *,
    place: str | None,
    task: str = "CAUSAL_LM",
    remedy: str = "Give train.model.pretrained or folder as well.",
) -> Any:
    """The model with LoRA adapters (Hu et al., 2021) by peft: only these are trained, saved and published.

    Args:
        options: some of `LORA`; empty: the model stays as it is.
        place: name or folder of the model; None: it begins at random, and takes no adapters.
        task: peft's name for the model's use.

    Raises:
        ConfigError: a setting is unknown, the model has no such layers, or begins at random. MissingExtraError: peft is
            not installed.
    """
    if not options:
        return model
    field = f"{FIELD}.lora"
    if place is None:
        raise ConfigError("Adapters are for a model that has been trained.", field=field, remedy=remedy)
    chosen = choose(options, LORA, field=field)
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("Adapters need peft.", extra="transformers") from error
    config = peft.LoraConfig(
        task_type=task,
        r=chosen["r"],
        lora_alpha=chosen["alpha"],
        lora_dropout=chosen["dropout"],
        target_modules=chosen["target_modules"] or "all-linear",
        modules_to_save=chosen["modules_to_save"] or None,
        exclude_modules=_HEADS if task in _WITH_HEADS else None,  # peft trains them as a whole
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        what, wrong = f"peft cannot add the adapters: {first_line(error)}", dict(options)
        remedy = "Name layers of the model, or leave target_modules out."
        raise ConfigError(what, field=field, value=wrong, remedy=remedy) from error
