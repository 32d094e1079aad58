"""The command line against transformers' own parser, dataclass by dataclass and word by word; help and refusals."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, List, Literal, Optional, Union  # noqa: UP035 - as older code writes them

import pytest

from trainer_lib import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments
from trainer_lib.arguments.fields import declarations
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
    assert ours == theirs
    assert type(ours.limit) is type(theirs.limit)


@pytest.mark.parametrize(
    "line",
    [
        *("", "--foo x", "--foo 1 --colour green", "--foo 1 --literal z", "--foo 1 --flag maybe", "--foo 1 --nope 3"),
        *("--foo 1 --numbers a", "--foo 1 --bar", "--foo 1 --numbers"),
    ],
)
def test_what_their_parser_refuses_ours_refuses_without_a_traceback(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)):
        _theirs(Everything).parse_args_into_dataclasses(line.split(), look_for_args_file=False)
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        HfArgumentParser(Everything, prog="train.py").parse_args_into_dataclasses(line.split())
    assert caught.value.code == 2
    assert "train.py: error: " in capsys.readouterr().err


def test_what_is_needed_and_what_is_false_unless_given() -> None:
    words = ["--words", "a", "b", "--rate", "1e-3", "--colour", "red"]
    (ours,) = HfArgumentParser(Required).parse_args_into_dataclasses(words)
    (theirs,) = _theirs(Required).parse_args_into_dataclasses(words, look_for_args_file=False)
    assert ours == theirs
    assert ours.flag is False
    with pytest.raises(ConfigError, match=r"required: --words"):
        HfArgumentParser(Required, exit_on_error=False).parse_args_into_dataclasses(words[3:])


def test_more_is_understood_than_by_theirs() -> None:
    def parsed(line: str) -> Everything:
        (found,) = HfArgumentParser(Everything).parse_args_into_dataclasses(shlex.split(f"--foo 1 {line}"))
        assert isinstance(found, Everything)
        return found

    assert parsed("--limit none").limit is None
    assert parsed("--colour BLUE").colour is Colour.BLUE
    assert parsed("--either '{\"a\": 1}'").either == {"a": 1}
    assert parsed("--numbers [1,2]").numbers == [1, 2]
    assert parsed('--words \'["a,b", "c"]\'').words == ["a,b", "c"]
    assert parsed("--names none").names is None
    assert parsed("--maybe").maybe is True


def test_a_dictionary_gives_what_it_gives_to_transformers_own_parser() -> None:
    given = {"foo": 1, "bar": 2.0, "words": ["a"], "flag": True, "colour": Colour.BLUE, "extra": 1}
    (theirs,) = _theirs(Everything).parse_dict(dict(given), allow_extra_keys=True)
    assert HfArgumentParser(Everything).parse_dict(given, allow_extra_keys=True) == (theirs,)


def test_choices_hold_for_values_of_every_type() -> None:
    @dataclass
    class Choice:
        size: int = field(default=1, metadata={"choices": [1, 2]})

    assert HfArgumentParser(Choice).parse_dict({"size": "2"})[0].size == 2
    with pytest.raises(ConfigError, match=r"size = 3: This is not one of the choices"):
        HfArgumentParser(Choice, exit_on_error=False).parse_args_into_dataclasses(["--size", "3"])


def test_a_namespace_has_every_argument_too() -> None:
    parser = HfArgumentParser(Everything)
    parser.add_argument("--by_hand", type=int, default=4)
    found = parser.parse_args(["--foo", "1", "--no_on"])
    assert (found.foo, found.on, found.bar, found.by_hand, found.words) == (1, False, 0.5, 4, ["Hallo", "Bonjour"])


def test_defaults_set_on_the_parser_count() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(learning_rate=1e-3, output_dir="here")
    (args,) = parser.parse_args_into_dataclasses(["--max_steps", "3"])
    assert (args.learning_rate, args.output_dir, args.max_steps) == (1e-3, "here", 3)


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
    parser.format_help()


def test_an_error_is_not_buried_under_two_hundred_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        HfArgumentParser(TrainingArguments, prog="train.py").parse_args_into_dataclasses(["--lerning_rate", "1"])
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2
    assert shown[0].startswith("usage: train.py ")
    assert shown[1] == 'train.py: error: --lerning_rate: No argument has this name. Did you mean "--learning_rate"?'


_SCRIPT = """
from dataclasses import dataclass
from trainer_lib import HfArgumentParser, TrainingArguments

@dataclass
class Model:
    width: int = 4

if __name__ == "__main__":
    model, args = HfArgumentParser((Model, TrainingArguments)).parse_args_into_dataclasses()
    print(model.width, args.learning_rate, args.bf16, args.output_dir)
"""


def test_a_script_reads_its_command_line_and_the_file_beside_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True)

    assert run("--width", "8", "--learning_rate", "3e-5", "--bf16", "--output_dir", "o").stdout == "8 3e-05 True o\n"
    (tmp_path / "train.args").write_text("--width 5\n--learning_rate 1e-2 --output_dir from-file\n")
    assert run("--width", "6").stdout == "6 0.01 False from-file\n"
    wrong = run("--learning_rate", "fast")
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
    assert "learning-rate: fast: This is not a finite number" in wrong.stderr


def test_defaults_are_not_shared_between_instances() -> None:
    parser = HfArgumentParser(Everything)
    one, other = (parser.parse_args_into_dataclasses(["--foo", "1"])[0] for _ in range(2))
    one.words.append("x")
    assert other.words == ["Hallo", "Bonjour"]
    assert dataclasses.asdict(other)["numbers"] == []


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("line", ["--gradient_checkpointing", "--activation_checkpointing", "--fsdp", "--bf16"])
def test_a_flag_alone_is_true_for_our_parser_and_for_theirs(line: str, ours: bool) -> None:
    parser = HfArgumentParser(TrainingArguments) if ours else _theirs(TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses([line], look_for_args_file=False)
    name = line.removeprefix("--")
    assert getattr(args, name) == ("full_shard" if name == "fsdp" else True)
