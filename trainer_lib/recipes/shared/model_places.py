"""Models of transformers: by name, from a folder, or at random from a configuration; with adapters on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError, MissingExtraError, first_line
from trainer_lib.recipes.shared.recipe_options import choose, require_choice
from trainer_lib.recipes.shared.targets import head_settings
from trainer_lib.trainer.model.models import keep_layout, refuse_names

if TYPE_CHECKING:
    from trainer_lib.recipes import DataInfo

FIELD = "train.model"
MODEL: dict[str, Any] = {
    "pretrained": None,  # name of the model on the Hub
    "folder": None,  # or its folder
    "config": {},  # or the configuration of one with weights at random
    "adapter": {},  # train adapters of this form (and a new head) in place of all weights
    "load_in": None,  # 4bit or 8bit: the loaded weights under adapters take less memory
}
"""The settings of `build_model` (`train.model`) for a model of transformers, with their defaults."""
ADAPTER: dict[str, Any] = {
    "kind": "lora",  # or dora, rslora
    "rank": 16,
    "alpha": None,  # the scale is alpha / rank, of rslora alpha / sqrt(rank); None: 2 rank, of rslora 16
    "dropout": 0.0,
    "targets": None,  # names of layers that get an adapter; None, or "all-linear": all linear ones but the head
    "modules_to_save": [],  # layers that are trained as a whole
}
"""The settings of adapters, with their defaults."""
KINDS = ("lora", "dora", "rslora")
BITS = ("4bit", "8bit")
DTYPES = ("float32", "bfloat16", "float16", "auto")
"""Types of a loaded model's weights."""
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Tokens that a model at random takes from its tokenizer."""
_BERT_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL_BERT, SMALL_LLAMA = {"model_type": "bert", **_BERT_SIZES}, {"model_type": "llama", **_LLAMA_SIZES}
"""Configurations of an encoder and of a model that continues texts at random, where `config` says nothing else."""
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

    Quantized weights keep their layout, and compute in the type of the training arguments.

    Raises:
        ConfigError: transformers cannot load it; `field` is the setting that names the model.
    """
    automatic = getattr(import_transformers(), kind)
    try:
        loaded = automatic.from_pretrained(place, **settings)
    except (ImportError, OSError, ValueError) as error:  # some models need packages of their own
        raise no_model(place, error, field=field) from error
    is_model = isinstance(loaded, nn.Module)  # a configuration may hold anything under this name
    if is_model and getattr(loaded, "is_quantized", False):
        keep_layout(loaded)
        loaded.computes_by_args = True
    return loaded


def no_model(place: str, error: Exception, *, field: str) -> ConfigError:
    """The error for a model that transformers cannot load."""
    return ConfigError(
        f"transformers cannot load this model: {first_line(error)}",
        field=field,
        value=place,
        remedy="Check the name; without a network, give the folder of a model (folder: PATH), or none, for a new one.",
    )


def new_config(settings: Mapping[str, Any], own: Mapping[str, Any], *, field: str) -> Any:
    """A configuration of transformers for a model at random; the user gave its settings `own`, in `field`.

    Raises:
        ConfigError: there is no such type of model, or no such setting, which transformers would keep without a word.
    """
    library, kind = import_transformers(), str(settings["model_type"])
    if kind not in library.CONFIG_MAPPING:
        remedy = suggestion(kind, library.CONFIG_MAPPING, listing=False)
        raise ConfigError("transformers has no such model.", field=f"{field}.model_type", value=kind, remedy=remedy)
    refuse_names(own, library.AutoConfig.for_model(kind), field=field)
    return library.AutoConfig.for_model(**settings)


# -- models with a head -----------------------------------------------------------------------------------------------
def build_with_head(
    chosen: Mapping[str, Any],
    data: DataInfo,
    *,
    head: str,
    task: str,
    small: Mapping[str, Any] = SMALL_BERT,
    **settings: Any,
) -> nn.Module:
    """Build a model that reads the data's tokens.

    Args:
        chosen: the settings of `MODEL`, and perhaps `new_head`: the head may have another shape.
        data: the `vocabulary` and `pad_token_id` of its tokenizer.
        head: the end of the name of its class, "ForQuestionAnswering"; empty for a model without a head.
        task: peft's name for its use.
        small: the configuration of a model at random, where `config` says nothing else.

    Raises ConfigError: transformers cannot load it.
    """
    place = one_of(chosen, field=FIELD)
    in_few_bits = quantized(chosen["load_in"], place=place, adapted=bool(chosen["adapter"]), task=task)
    if place is None:
        given = {"vocab_size": data.info["vocabulary"], "pad_token_id": data.info["pad_token_id"], **settings}
        config = new_config({**small, **chosen["config"], **given}, chosen["config"], field=f"{FIELD}.config")
        model = getattr(import_transformers(), f"AutoModel{head}").from_config(config)
    else:
        settings["ignore_mismatched_sizes"] = chosen.get("new_head", False)
        model = from_place(f"AutoModel{head}", place, field=FIELD, **settings, **in_few_bits)
    return add_adapters(model, chosen["adapter"], place=place, task=task)


def build_classifier(options: Mapping[str, Any], data: DataInfo, *, head: str, task: str, **settings: Any) -> nn.Module:
    """Build a model for the labels of the data, or those of `settings`; arguments as of `build_with_head`.

    Raises:
        ConfigError: transformers cannot load it, or its head was trained for another number of classes.
    """
    chosen = choose(options, {**MODEL, "new_head": False}, field=FIELD)
    settings = settings or head_settings(data.info)
    if (place := one_of(chosen, field=FIELD)) is not None:
        require_head(place, head, len(settings["id2label"]), is_new=chosen["new_head"])
    return build_with_head(chosen, data, head=head, task=task, **settings)


def require_head(place: str, head: str, classes: int, *, is_new: bool, has_head: bool = False) -> None:
    """Raise ConfigError for a head of another number of classes, unless a new one is asked for."""
    config = from_place("AutoConfig", place, field=FIELD)
    has_head = has_head or any(head in name for name in config.architectures or ())
    if has_head and config.num_labels != classes and not is_new:
        what = f"The model's head knows {config.num_labels} classes, and the data has {classes}."
        remedy = "Set train.model.new_head=true: the head then begins at random."
        raise ConfigError(what, field=f"{FIELD}.new_head", value=False, remedy=remedy)


# -- models that continue texts ---------------------------------------------------------------------------------------
def new_causal_model(
    config: Mapping[str, Any], *, length: int, vocabulary: int, ends: Mapping[str, Any], field: str = FIELD
) -> Any:
    """A model with weights at random, for rows of `length` tokens; `field` holds its `config`."""
    given = {"max_position_embeddings": length, "vocab_size": vocabulary, **ends}
    made = new_config({**SMALL_LLAMA, **given, **config}, config, field=f"{field}.config")
    return import_transformers().AutoModelForCausalLM.from_config(made)


def load_causal_model(
    place: str, *, dtype: str, vocabulary: int, field: str, settings: Mapping[str, Any] | None = None
) -> Any:
    """The model of this name or folder, with weights of one of `DTYPES`, or quantized by `settings` of `quantized`.

    Raises:
        ConfigError: transformers cannot load it, or it does not know all tokens of the data's `vocabulary`.
    """
    model = from_place("AutoModelForCausalLM", place, field=field, dtype=dtype, **(settings or {}))
    known = model.get_input_embeddings().num_embeddings
    if known < vocabulary:
        what = f"The model knows {known:,} tokens, and the tokenizer of the data has {vocabulary:,}."
        remedy = "Name one model in train.model and in prepare.options."
        raise ConfigError(what, field=field, value=place, remedy=remedy)
    return model


def require_positions(options: Mapping[str, Any], option: str, *, field: str) -> str | None:
    """As `one_of`. Raises ConfigError also for an `option` of more tokens than the model says that it reads."""
    if (place := one_of(options, field=field)) is None:
        return None
    try:
        config = import_transformers().AutoConfig.from_pretrained(place)
    except (OSError, ValueError):
        return place  # a tokenizer may be alone in its folder
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and options[option] > most:
        what, remedy = f"The model reads at most {most:,} tokens.", f"Give at most {most}."
        raise ConfigError(what, field=f"{field}.{option}", value=options[option], remedy=remedy)
    return place


# -- adapters ---------------------------------------------------------------------------------------------------------
def quantized(
    load_in: str | None, *, place: str | None, adapted: bool, task: str = "CAUSAL_LM", field: str = FIELD
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for weights in 8 bits, or NF4 with double quantization (Dettmers et al., 2023).

    Without `load_in`, one of `BITS`, there are none. A head that is trained as a whole, by peft's name for its `task`,
    keeps its type.

    Raises:
        ConfigError: the model begins at random, or has no adapters. MissingExtraError: bitsandbytes is not installed.
    """
    if load_in is None:
        return {}
    field = f"{field}.load_in"
    require_choice(load_in, BITS, field=field)
    if place is None:
        what, remedy = "A model that begins at random loads no weights.", "Remove it, or give pretrained or folder."
        raise ConfigError(what, field=field, value=load_in, remedy=remedy)
    if not adapted:
        what = "Quantized weights have no gradient, so they are trained by adapters alone."
        remedy = "Add train.model.adapter={kind: lora}, or remove load_in."
        raise ConfigError(what, field=field, value=load_in, remedy=remedy)
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        what = f"Weights in {load_in} need bitsandbytes."
        raise MissingExtraError(what, extra="quantization", field=field, value=load_in) from error
    config = import_transformers().BitsAndBytesConfig(
        load_in_4bit=load_in == "4bit",
        load_in_8bit=load_in == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["classifier", "score", "qa_outputs"] if task in _WITH_HEADS else None,
    )
    return {"quantization_config": config}


@contextmanager
def as_it_began(model: Any, first: Callable[[], nn.Module]) -> Iterator[Any]:
    """The model as it was before training: without its adapters; of another model, what `first` gives."""
    if hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            yield model
    else:
        yield first()


def add_adapters(
    model: nn.Module,
    options: Mapping[str, Any],
    *,
    place: str | None,
    task: str = "CAUSAL_LM",
    remedy: str = "Give train.model.pretrained or folder as well.",
) -> nn.Module:
    """The model with adapters by peft: only these are trained, saved and published.

    They are those of LoRA (Hu et al., 2021), DoRA (Liu et al., 2024) or rsLoRA (Kalajdzievski, 2023).

    Without options, some of `ADAPTER`, it stays as it is. A model at random, without a `place`, takes none.

    Raises:
        ConfigError: a setting is unknown or has no sense, the model has no such layers, or begins at random.
            MissingExtraError: peft is not installed.
    """
    if not options:
        return model
    if place is None:
        what = "Adapters are for a model that has been trained."
        raise ConfigError(what, field=f"{FIELD}.adapter", remedy=remedy)
    settings = _read_adapter(model, options)
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("Adapters need peft.", extra="transformers") from error
    config = peft.LoraConfig(
        task_type=task,
        exclude_modules=_HEADS if task in _WITH_HEADS else None,  # peft trains them as a whole
        **settings,
    )
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        what, remedy = f"peft cannot add the adapters: {first_line(error)}", "Name layers of the model."
        raise ConfigError(what, field=f"{FIELD}.adapter", value=dict(options), remedy=remedy) from error
    return adapted


def _read_adapter(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of peft's `LoraConfig` for some of `ADAPTER`; ConfigError for those that have no sense."""
    field = f"{FIELD}.adapter"
    chosen = choose(options, ADAPTER, field=field)
    require_choice(chosen["kind"], KINDS, field=f"{field}.kind")
    if chosen["kind"] == "dora" and getattr(model, "is_loaded_in_8bit", False):
        what, remedy = "DoRA cannot train on weights in 8 bits.", "Give lora or rslora, or train.model.load_in=4bit."
        raise ConfigError(what, field=f"{field}.kind", value="dora", remedy=remedy)
    rank, scaled, targets = chosen["rank"], chosen["kind"] == "rslora", chosen["targets"]
    alpha = (16 if scaled else 2 * rank) if chosen["alpha"] is None else chosen["alpha"]
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    for name, is_right, remedy in (
        ("rank", rank >= 1, "Give a whole number from 1 on, such as 16."),
        ("alpha", is_number and 0 < alpha < float("inf"), f"Give a number above 0, such as {2 * rank}."),
        ("dropout", 0 <= chosen["dropout"] < 1, "Give a number from 0 on and below 1."),
        ("targets", targets in (None, "all-linear") or _is_list(targets), "Give all-linear, or a list of names."),
        ("modules_to_save", _is_list(chosen["modules_to_save"], least=0), "Give a list of names."),
    ):
        if not is_right:
            raise ConfigError("Adapters have no such form.", field=f"{field}.{name}", value=chosen[name], remedy=remedy)
    named = targets if isinstance(targets, list) else []
    for name, names in (("targets", named), ("modules_to_save", chosen["modules_to_save"])):
        _require_layers(model, names, field=f"{field}.{name}")
    return {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": chosen["dropout"],
        "target_modules": named or "all-linear",
        "modules_to_save": chosen["modules_to_save"] or None,
        "use_dora": chosen["kind"] == "dora",
        "use_rslora": scaled,
    }


def _is_list(value: Any, least: int = 1) -> bool:
    return isinstance(value, list) and len(value) >= least and all(isinstance(name, str) for name in value)


def _require_layers(model: nn.Module, names: Sequence[str], *, field: str) -> None:
    """Raise ConfigError for a name of no layer, or of one whose weight is another layer's as well."""
    layers = dict(model.named_modules())
    uses = Counter(weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False))
    for name in names:
        meant = [layer for path, layer in layers.items() if path == name or path.endswith(f".{name}")]
        if not meant:
            known = {path.rpartition(".")[2] for path, layer in layers.items() if not list(layer.children())}
            remedy = suggestion(name, sorted(part for part in known if part and not part.isdigit()))
            raise ConfigError("The model has no such layer.", field=field, value=name, remedy=remedy)
        if any(uses[weight.data_ptr()] > 1 for layer in meant for weight in layer.parameters(recurse=False)):
            what = "This layer shares its weight with another one, which the trained one would leave."
            raise ConfigError(what, field=field, value=name, remedy="Leave it out.")
