"""The command line: dataclasses as arguments, transformers' own parser word by word, help, files and refusals."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, List, Literal, Optional, Union  # noqa: UP035 - as older code writes them

import pytest

from trainer_lib import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
from trainer_lib.arguments import ArgumentParser
from trainer_lib.arguments.fields import declarations
from trainer_lib.base.yaml_text import dump_yaml
from trainer_lib.errors import ConfigError


class Colour(str, Enum):  # noqa: UP042 - as older code writes it
    """A choice."""

    RED = "red"
    BLUE = "blue"


class Number(IntEnum):
    """A choice among numbers."""

    ONE = 1
    TWO = 2


@dataclass
class Everything:
    """A dataclass with one of each, in the spelling of all ages."""

    foo: int
    bar: float = 0.5
    baz: str = "x"
    must: bool = False
    flag: bool = False
    on: bool = True
    maybe: Optional[bool] = None  # noqa: UP045
    colour: Colour = Colour.RED
    literal: Literal["a", "b", 3] = "a"
    numbers: List[int] = field(default_factory=list)  # noqa: UP006
    words: list[str] = field(default_factory=lambda: ["Hallo", "Bonjour"])
    limit: Optional[int] = None  # noqa: UP045
    names: list[str] | None = None
    count: Number = Number.ONE
    either: Union[dict, str, None] = None  # type: ignore[type-arg]  # noqa: UP007
    long_name: str = field(default="y", metadata={"aliases": ["--short", "-s"], "help": "100 % sure."})
    alias: str = field(default="z", metadata={"aliases": "-a"})


@dataclass
class Required:
    """Nothing has a default."""

    words: list[str]
    rate: float
    flag: bool
    colour: Colour


@dataclass
class ModelChoice:
    """Which model."""

    name: str
    size: Literal["small", "large"] = "small"
    width: int | None = None
    layers: list[int] = field(default_factory=lambda: [1, 2])
    tie: bool = True
    notes: dict[str, Any] | None = None
    path: Path | None = None


def _parse(text: str, *types: type) -> Any:
    return ArgumentParser(types or (ModelChoice,), exit_on_error=False).parse_args_into_dataclasses(text.split())


def test_any_dataclass_becomes_arguments() -> None:
    (model,) = _parse("--name x --size large --width none --layers 3 4 --no_tie --path a/b")
    assert model == ModelChoice("x", "large", None, [3, 4], False, None, Path("a/b"))
    assert _parse("--name x --tie false")[0].tie is False and _parse("--name x --tie")[0].tie is True
    assert _parse("--name x --layers [5]")[0].layers == [5]
    (args, model) = _parse("--name x --learning-rate 3e-5 --fp16", TrainingArguments, ModelChoice)
    assert (args.learning_rate, args.fp16, model.name) == (3e-5, True, "x")


def _theirs(cls: Any) -> Any:
    import transformers

    return transformers.HfArgumentParser(cls)


@pytest.mark.parametrize(
    "line",
    [
        *("--foo 1", "--foo=-1 --bar -0.002", "--foo 1 --flag", "--foo 1 --flag true", "--foo 1 --flag False --no_on"),
        *("--foo 1 --no-on", "--foo 1 --on no", "--foo 1 --on", "--foo 1 --maybe true", "--foo 1 --maybe n"),
        *("--foo 1 --colour blue", "--foo 1 --literal 3", "--foo 1 --literal b", "--foo 1 --numbers 1 -2 3"),
        *("--foo 1 --words a", "--foo 1 --words a b", "--foo 1 --words a,b", "--foo 1 --words [a", "--foo 1 --limit 5"),
        *("--foo 1 --words ''", "--foo 1 --names a b", "--foo 1 --count 2", "--foo 1 --either x", "--foo 1 --baz a,b"),
        *("--foo 1 --baz none", "--foo 1 --long-name q", "--foo 1 --short q", "--foo 1 -s q", "--foo 1 -a q"),
    ],
)
def test_words_mean_what_they_mean_to_transformers_own_parser(line: str) -> None:
    words = shlex.split(line)
    (theirs,) = _theirs(Everything).parse_args_into_dataclasses(words, look_for_args_file=False)
    (ours,) = HfArgumentParser(Everything).parse_args_into_dataclasses(words, look_for_args_file=False)
    assert ours == theirs and type(ours.limit) is type(theirs.limit)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "the following arguments are required: --foo"),
        ("--foo x", "This is not a whole number."),
        ("--foo 1 --colour green", "This is not one of the choices. Choose one of: red, blue."),
        ("--foo 1 --literal z", "This is not one of the choices. Choose one of: a, b, 3."),
        ("--foo 1 --flag maybe", "This is not a truth value."),
        ("--foo 1 --nope 3", "--nope: No argument has this name."),
        ("--foo 1 --limti 3", '--limti: No argument has this name. Did you mean "--limit"?'),
        ("--foo 1 --numbers 1 a", "a: This is not a whole number."),
        ("--foo 1 --bar", "expected one argument"),
        ("--foo 1 --numbers", "expected at least one argument"),
    ],
)
def test_what_their_parser_refuses_ours_refuses_by_name(line: str, said: str, capsys: Any) -> None:
    with pytest.raises((SystemExit, ValueError)):
        _theirs(Everything).parse_args_into_dataclasses(line.split(), look_for_args_file=False)
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        HfArgumentParser(Everything, prog="train.py").parse_args_into_dataclasses(line.split())
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert "train.py: error: " in shown and said in shown


def test_what_is_needed_and_what_is_false_unless_given() -> None:
    words = ["--words", "a", "b", "--rate", "1e-3", "--colour", "red"]
    (ours,) = HfArgumentParser(Required).parse_args_into_dataclasses(words)
    (theirs,) = _theirs(Required).parse_args_into_dataclasses(words, look_for_args_file=False)
    assert ours == theirs and ours.flag is False
    with pytest.raises(ConfigError, match=r"required: --words"):
        HfArgumentParser(Required, exit_on_error=False).parse_args_into_dataclasses(words[3:])
    given = {"foo": 1, "bar": 2.0, "words": ["a"], "flag": True, "colour": Colour.BLUE, "extra": 1}
    (theirs,) = _theirs(Everything).parse_dict(dict(given), allow_extra_keys=True)
    assert HfArgumentParser(Everything).parse_dict(given, allow_extra_keys=True) == (theirs,)


def test_more_is_understood_than_by_theirs() -> None:
    def parsed(line: str) -> Everything:
        (found,) = HfArgumentParser(Everything).parse_args_into_dataclasses(shlex.split(f"--foo 1 {line}"))
        assert isinstance(found, Everything)
        return found

    assert parsed("--limit none").limit is None and parsed("--colour BLUE").colour is Colour.BLUE
    assert parsed("--either '{\"a\": 1}'").either == {"a": 1} and parsed("--numbers [1,2]").numbers == [1, 2]
    assert parsed('--words \'["a,b", "c"]\'').words == ["a,b", "c"] and parsed("--names none").names is None
    assert parsed("--maybe").maybe is True


@pytest.mark.parametrize("line", ["--gradient_checkpointing", "--activation_checkpointing", "--fsdp", "--bf16"])
def test_a_flag_alone_is_true_for_our_parser_and_for_theirs(line: str) -> None:
    for parser in (HfArgumentParser(TrainingArguments), _theirs(TrainingArguments)):
        (args,) = parser.parse_args_into_dataclasses([line], look_for_args_file=False)
        assert getattr(args, line.removeprefix("--")) == ("full_shard" if line == "--fsdp" else True)


# -- lines of documents -----------------------------------------------------------------------------------------------
ONE: dict[str, Any] = dict.fromkeys(("num_train_epochs", "per_device_train_batch_size"), 1)
ONE |= {"output_dir": "output_dir", "overwrite_output_dir": True, "do_train": True}
TRANSLATION = (
    "--model_name_or_path t5-small --data_dir wmt_en_ro --output_dir output_dir --overwrite_output_dir --do_train "
    '--n_train 500 --num_train_epochs 1 --per_device_train_batch_size 1 --dataset_config "ro-en" --task translation'
)
#: Command line of a document that describes the Trainer of transformers -> the arguments that it means.
LINES: dict[str, dict[str, Any]] = {
    f"{TRANSLATION} --fp16 --sharded_ddp": {**ONE, "fp16": True, "fsdp": "shard_grad_op"},
    f"--deepspeed ds_config.json {TRANSLATION}": {**ONE, "deepspeed": "ds_config.json"},
    f"{TRANSLATION} --fp16 --sharded_ddp simple": {**ONE, "fp16": True, "fsdp": "shard_grad_op"},
    '--fp16 --sharded_ddp "zero_dp_2 cpu_offload"': {"fp16": True, "fsdp": "shard_grad_op offload"},
    '--sharded_ddp "zero_dp_3 auto_wrap"': {"fsdp": "full_shard auto_wrap"},
    "--fp16 --fp16_backend apex --fp16_opt_level 01": {"fp16": True},
    "--local-rank=0 --fp16": {"local_rank": 0, "fp16": True},  # what python -m torch.distributed.launch adds
    "--do_predict --log_level warning --log_on_each_node 0": {
        "do_predict": True,
        "log_level": "warning",
        "log_on_each_node": False,
    },
    '--fsdp "shard_grad_op offload auto_wrap" --fsdp_config fsdp_config.json': {
        "fsdp": "shard_grad_op offload auto_wrap",
        "fsdp_config": "fsdp_config.json",
    },
    "--evaluation_strategy epoch --no_cuda --warmup_ratio 0.1 --per_gpu_train_batch_size 4": {
        "eval_strategy": "epoch",
        "do_eval": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "warmup_steps": 0.1,
        "per_device_train_batch_size": 4,
    },
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.filterwarnings("ignore:.* is an old name:DeprecationWarning")
def test_a_command_line_means_the_right_arguments(line: str) -> None:
    parser = HfArgumentParser(Seq2SeqTrainingArguments, exit_on_error=False)
    args, remaining = parser.parse_args_into_dataclasses(shlex.split(line), return_remaining_strings=True)
    usual = Seq2SeqTrainingArguments().to_dict()
    assert {name: value for name, value in args.to_dict().items() if usual[name] != value} == LINES[line]
    assert not {word for word in remaining if word.startswith("--")} & {f"--{name}" for name in usual}


# -- refusals and help ------------------------------------------------------------------------------------------------
def test_an_error_ends_a_script_and_is_not_buried_under_two_hundred_options(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser(TrainingArguments, prog="train.py")
    unknown = 'train.py: error: --lerning_rate: No argument has this name. Did you mean "--learning_rate"?'
    for words, said in (
        (["--learning_rate", "abc"], "learning-rate: abc: This is not a finite number"),
        (["--fp16", "--bf16"], "fp16 = True"),
        (["--lerning_rate", "1"], unknown),
    ):
        with pytest.raises(SystemExit) as caught:
            parser.parse_args_into_dataclasses(words)
        assert caught.value.code == 2
        usage, error = capsys.readouterr().err.splitlines()
        assert usage.startswith("usage: train.py ")
        assert said in error


@pytest.mark.parametrize("cls", [TrainingArguments, Seq2SeqTrainingArguments])
def test_help_says_meaning_default_and_unit_of_every_argument(cls: Any) -> None:
    parser = HfArgumentParser(cls)
    actions = {action.dest: action for action in parser._actions if action.help not in (None, "==SUPPRESS==")}
    for name, each in declarations(cls).items():
        shown = str(actions[name].help)
        assert len(shown.split("[")[0]) > 15, name
        if not each.secret:
            assert "default: " in shown, name
        if each.unit:
            assert f"unit: {each.unit}" in shown, name
    text = " ".join(parser.format_help().split())
    assert "Samples that one process trains on at a time (the micro-batch). [unit: samples; default: 8]" in text
    assert "When to evaluate during training. One of: no, steps, epoch. [default: no]" in text
    assert "--evaluation_strategy" not in text


def test_choices_hold_for_values_of_every_type_and_two_dataclasses_may_not_share_a_name() -> None:
    @dataclass
    class Choice:
        size: int = field(default=1, metadata={"choices": [1, 2]})

    assert HfArgumentParser(Choice).parse_dict({"size": "2"})[0].size == 2
    with pytest.raises(ConfigError, match=r"size = 3: This is not one of the choices"):
        HfArgumentParser(Choice, exit_on_error=False).parse_args_into_dataclasses(["--size", "3"])
    with pytest.raises(ConfigError, match="size: This is a field of both"):
        ArgumentParser((ModelChoice, Choice))
    with pytest.raises(ConfigError, match="is not a dataclass"):
        ArgumentParser(int)


# -- namespaces, defaults, files --------------------------------------------------------------------------------------
def test_arguments_added_by_hand_come_back_in_a_namespace_and_defaults_set_on_the_parser_count() -> None:
    parser = HfArgumentParser(Everything)
    parser.add_argument("--by_hand", type=int, default=4)
    found = parser.parse_args(["--foo", "1", "--no_on"])
    assert (found.foo, found.on, found.bar, found.by_hand, found.words) == (1, False, 0.5, 4, ["Hallo", "Bonjour"])
    given, rest = parser.parse_args_into_dataclasses(["--foo", "1", "--by_hand", "5"])
    assert (given.foo, rest.by_hand) == (1, 5)
    *_, remaining = parser.parse_args_into_dataclasses(["--foo", "1", "--else", "1"], return_remaining_strings=True)
    assert remaining == ["--else", "1"]
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(learning_rate=1e-3, output_dir="here")
    (args,) = parser.parse_args_into_dataclasses(["--max_steps", "3"])
    assert (args.learning_rate, args.output_dir, args.max_steps) == (1e-3, "here", 3)


def test_defaults_are_not_shared_between_instances() -> None:
    parser = HfArgumentParser(Everything)
    one, other = (parser.parse_args_into_dataclasses(["--foo", "1"])[0] for _ in range(2))
    one.words.append("x")
    assert other.words == ["Hallo", "Bonjour"] and dataclasses.asdict(other)["numbers"] == []


def test_words_come_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "a.args").write_text("--name from-file\n--width 3\n")
    parser = ArgumentParser(ModelChoice, exit_on_error=False)
    (model,) = parser.parse_args_into_dataclasses(["--width", "4"], args_filename=str(tmp_path / "a.args"))
    assert (model.name, model.width) == ("from-file", 4)
    words = ["--args_file", str(tmp_path / "a.args")]
    assert parser.parse_args_into_dataclasses(words, args_file_flag="args_file")[0].width == 3
    with pytest.raises(ConfigError, match="cannot be read"):
        parser.parse_args_into_dataclasses([], args_filename=str(tmp_path / "none.args"))


def test_mappings_and_files_become_instances(tmp_path: Path) -> None:
    parser = ArgumentParser((TrainingArguments, ModelChoice))
    values = {"output_dir": "o", "learning_rate": "1e-2", "name": "x", "layers": "3,4"}
    args, model = parser.parse_dict(values)
    assert (args.learning_rate, model.layers) == (1e-2, [3, 4])
    (tmp_path / "v.json").write_text(json.dumps(values))
    (tmp_path / "v.yaml").write_text(dump_yaml(values))
    assert parser.parse_json_file(tmp_path / "v.json") == (args, model)
    assert parser.parse_yaml_file(str(tmp_path / "v.yaml")) == (args, model)
    with pytest.raises(ConfigError, match=r'nmae: No argument has this name\. Did you mean "name"'):
        parser.parse_dict({**values, "nmae": "y"})
    assert parser.parse_dict({**values, "nmae": "y"}, allow_extra_keys=True)[1].name == "x"
    with pytest.raises(ConfigError, match="name = none: ModelChoice needs this argument"):
        parser.parse_dict({})


def test_a_script_reads_its_words_and_the_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*words: str) -> tuple[Any, ...]:
        monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), *words])
        model, args = HfArgumentParser((ModelChoice, TrainingArguments)).parse_args_into_dataclasses()
        return model.width, args.learning_rate, args.bf16, args.output_dir

    given = ("--name", "x", "--width", "8", "--learning_rate", "3e-5", "--bf16", "--output_dir", "o")
    assert parsed(*given) == (8, 3e-5, True, "o")
    (tmp_path / "train.args").write_text("--width 5 --name y\n--learning_rate 1e-2 --output_dir from-file\n")
    assert parsed("--width", "6") == (6, 0.01, False, "from-file")
