"""Turn any dataclass into command-line arguments, on top of argparse.

A field becomes `--name` (or `--na-me`), and its help shows unit and default. A truth value is a flag: `--flag`,
`--flag false`, and `--no_flag` where the default is true; without a default it is false. Lists take several words (or
JSON), mappings take JSON, and `none` is None where None is allowed. Old names of `TrainingArguments` are accepted, but
the help leaves them out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from trainer_lib.arguments import compat
from trainer_lib.arguments.coerce import NONE_WORDS, check_bounds, coerce, read_mapping
from trainer_lib.arguments.fields import Declaration, declarations, field_hints
from trainer_lib.arguments.training import TrainingArguments, constructor_names
from trainer_lib.base.json_text import parse_json
from trainer_lib.base.suggestions import suggestion
from trainer_lib.errors import ConfigError

DataClass = Any
_SHORT_USAGE = 30  # arguments whose usage still fits above an error


class ArgumentParser(argparse.ArgumentParser):
    """Makes arguments from dataclasses and instances from arguments; `HfArgumentParser` is another name of it.

    A wrong argument ends the program with a usage message and exit code 2. With `exit_on_error=False`, and in the
    `parse_dict` family, it raises a ConfigError instead.

    Args:
        dataclass_types: one dataclass or several; no two may share a field's name.
        kwargs: arguments of `argparse.ArgumentParser`.

    Raises:
        ConfigError: two dataclasses share a field's name, or a type is not a dataclass.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)  # `--log` would mean whichever argument happens to begin so
        super().__init__(**kwargs)
        if dataclass_types is None:
            dataclass_types = ()
        self.dataclass_types = (dataclass_types,) if isinstance(dataclass_types, type) else tuple(dataclass_types)
        owners: dict[str, str] = {}
        for cls in self.dataclass_types:
            for field in _init_fields(cls):
                if field.name in owners:
                    what = f"This is a field of both {owners[field.name]} and {cls.__name__}."
                    raise ConfigError(what, field=field.name, remedy="Rename one of them.")
                owners[field.name] = cls.__name__
            group = self.add_argument_group(cls.__name__, (cls.__doc__ or "").strip().split("\n")[0] or None)
            hints, declared = field_hints(cls), declarations(cls)
            for field in _init_fields(cls):
                _add_field(group, field, hints.get(field.name, Any), declared[field.name])
            if issubclass(cls, TrainingArguments):
                add_old_names(group, cls, "store")

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[DataClass, ...]:
        """Parse words into instances of the dataclasses, in their order, and a namespace of arguments added by hand.

        Args:
            args: words of the command line; `sys.argv` when not given.
            return_remaining_strings: append the list of unknown words, instead of refusing them.
            look_for_args_file: read words from `<script>.args` next to the script, if there is one.
            args_filename: read words from this file first.
            args_file_flag: the argument (`--args_file`) that names such files.

        Raises:
            ConfigError: an argument is wrong, and `exit_on_error` is False.
        """
        try:
            words = list(sys.argv[1:] if args is None else args)
            words = _from_files(words, look_for_args_file, args_filename, args_file_flag)
            namespace, remaining = self.parse_known_args(words)
            if remaining and not return_remaining_strings:
                raise _unknown(remaining[0], [option for action in self._actions for option in action.option_strings])
            values = vars(namespace)
            outputs = self._instances(values)
            outputs += [argparse.Namespace(**values)] if values else []
        except argparse.ArgumentError as error:
            # argparse flattens what a type function raises into text; our error with its fields is the context.
            refusal = error.__context__
            if isinstance(refusal, _Refused):
                raise refusal.error from None
            raise ConfigError(str(error.message), field=error.argument_name, remedy="See --help.") from None
        except ConfigError as error:
            if self.exit_on_error:
                self.error(str(error))
            raise
        return (*outputs, remaining) if return_remaining_strings else tuple(outputs)

    @override
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found = super().parse_args(args, namespace)  # `_add_field` suppresses the defaults
        for cls in self.dataclass_types:
            for field in _init_fields(cls):
                if not hasattr(found, field.name):
                    setattr(found, field.name, _default(field))
        return found

    @override
    def error(self, message: str) -> NoReturn:
        if self.exit_on_error:
            if len(self._actions) <= _SHORT_USAGE:
                super().error(message)
            # A screen full of options would hide the error.
            usage = f"usage: {self.prog} [--name value ...]   (--help lists them)"
            self.exit(2, f"{usage}\n{self.prog}: error: {message}\n")
        raise ConfigError(f"{message}.", remedy="See --help.")

    def _instances(self, values: dict[str, Any]) -> list[DataClass]:
        """Make the instances, and remove from `values` what they took."""
        outputs: list[DataClass] = []
        for cls in self.dataclass_types:
            fields = {field.name: field for field in _init_fields(cls)}
            # Old names are not fields: the class translates them when it is called.
            old = set(compat.OLD_NAMES) if issubclass(cls, TrainingArguments) else set()
            given = {name: values.pop(name) for name in list(values) if name in fields or name in old}
            hints, declared = field_hints(cls), declarations(cls)
            for name, field in fields.items():
                if name in given:
                    given[name] = _checked(name, hints.get(name, Any), declared[name], given[name])
                elif _default(field) is dataclasses.MISSING:
                    what = f"{cls.__name__} needs this argument."
                    raise ConfigError(what, field=name, value="none", remedy="Give it.")
            outputs.append(cls(**given))
        return outputs

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[DataClass, ...]:
        """Make instances of the dataclasses from a mapping, in their order.

        Args:
            args: names and values; texts are converted to the field's type.
            allow_extra_keys: ignore names that are not fields.

        Raises:
            ConfigError: a name is not a field (unless allowed), or a value is refused.
        """
        unused = dict(args)
        outputs = self._instances(unused)
        if unused and not allow_extra_keys:
            names = [field.name for cls in self.dataclass_types for field in _init_fields(cls)]
            raise _unknown(next(iter(unused)), names)
        return tuple(outputs)

    def parse_json_file(self, json_file: str | PathLike[str], allow_extra_keys: bool = False) -> tuple[DataClass, ...]:
        """Apply `parse_dict` to a JSON file."""
        return self.parse_dict(read_mapping(Path(json_file), field="json_file"), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | PathLike[str], allow_extra_keys: bool = False) -> tuple[DataClass, ...]:
        """Apply `parse_dict` to a YAML file."""
        return self.parse_dict(read_mapping(Path(yaml_file), field="yaml_file"), allow_extra_keys)


HfArgumentParser = ArgumentParser


class _Translated(argparse.Action):
    """Sets the new arguments of an old name, for a parser that fills fields alone."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        try:
            for name, value in compat.changes_for(self.dest, values).items():
                setattr(namespace, name, value)
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from error


def add_old_names(parser: Any, cls: type, action: Any = _Translated) -> None:
    """Add the old names of the arguments to a parser, without help; those that are fields of `cls` are left out."""
    # An organization is joined with the model's name by the class alone.
    left_out = {*constructor_names(cls), *(("push_to_hub_organization",) if action is _Translated else ())}
    for name in compat.OLD_NAMES:
        if name not in left_out:
            # Old flags, such as --no_cuda, were given without a value.
            settings: dict[str, Any] = {"nargs": "?", "const": "true", "action": action}
            parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **settings)


def _init_fields(cls: type) -> list[dataclasses.Field[Any]]:
    if not dataclasses.is_dataclass(cls):
        remedy = "Decorate it."
        raise ConfigError("This is not a dataclass.", field="dataclass_types", value=cls.__name__, remedy=remedy)
    return [field for field in dataclasses.fields(cls) if field.init]


def _add_field(group: Any, field: dataclasses.Field[Any], hint: Any, declared: Declaration) -> None:
    options = [f"--{field.name}", *([f"--{field.name.replace('_', '-')}"] if "_" in field.name else [])]
    # `aliases` is how transformers' HfArg writes them.
    aliases = field.metadata.get("aliases") or []
    options += [aliases] if isinstance(aliases, str) else aliases
    default = _default(field)
    settings: dict[str, Any] = {"dest": field.name, "help": _help(field, hint, declared, default)}
    # As in the reference: a flag without a default is false when it is not given.
    is_flag = hint is bool and default is dataclasses.MISSING
    settings["default"] = False if is_flag else argparse.SUPPRESS  # the dataclass itself fills what is not given
    settings["required"] = default is dataclasses.MISSING and not is_flag
    kinds = _kinds(hint)
    parse = _parser(field.name, hint, declared)
    lists = any(typing.get_origin(kind) in (list, tuple, set) or kind in (list, tuple, set) for kind in kinds)
    if bool in kinds and not lists:
        group.add_argument(*options, nargs="?", const=True, type=parse, metavar="BOOL", **settings)
        if default is True:
            negative = {"dest": field.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            names = (f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}")
            group.add_argument(*names, action="store_const", const=False, **negative)
        return
    if lists:
        settings["nargs"] = "*" if bool in kinds else "+"
        settings["action"] = _Joined
    group.add_argument(*options, type=str if "nargs" in settings else parse, metavar=field.name.upper(), **settings)
    if "nargs" in settings:
        group._group_actions[-1].convert = parse
        # A declared list may be one word with commas; an item of a user's list of texts may contain commas.
        has_texts = any(str in typing.get_args(k) for k in kinds if typing.get_origin(k) in (list, tuple, set))
        group._group_actions[-1].splits = declared.by_arg or not has_texts


class _Refused(argparse.ArgumentTypeError):
    """The refusal of a value by a field; argparse puts the argument's name before it."""

    def __init__(self, error: ConfigError) -> None:
        super().__init__(" ".join(part for part in (f"{error.value}:", error.message, error.remedy) if part))
        self.error = error


class _Joined(argparse.Action):
    """Joins several words into one list; keeps a single one as it is, so that `none` and `[…]` keep their meaning."""

    convert: Callable[[Any], Any]
    splits: bool

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        values = values or ["true"]  # a bare flag, where a truth value may take the place of the list
        alone = len(values) == 1 and (self.splits or _is_list_or_none(values[0]))
        try:
            setattr(namespace, self.dest, self.convert(values[0] if alone else list(values)))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from error


def _is_list_or_none(word: str) -> bool:
    if word.strip().lower() in NONE_WORDS:
        return True
    try:
        return isinstance(parse_json(word), list)
    except ValueError:
        return False


def _parser(name: str, hint: Any, declared: Declaration) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        try:
            return _checked(name, hint, declared, value)
        except ConfigError as error:
            raise _Refused(error) from None

    parse.__name__ = name  # argparse shows it in its own messages
    return parse


def _checked(name: str, hint: Any, declared: Declaration, value: Any) -> Any:
    out = coerce(value, hint, field=name)
    check_bounds(name, out, declared)
    return out


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _kinds(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return [hint]


def _help(field: dataclasses.Field[Any], hint: Any, declared: Declaration, default: Any) -> str:
    parts = [str(field.metadata.get("help") or "")]
    choices = [str(choice) for choice in declared.choices or ()]
    for kind in _kinds(hint):
        if isinstance(kind, type) and issubclass(kind, Enum):
            choices += [str(member.value) for member in kind]
        elif typing.get_origin(kind) is typing.Literal:
            choices += [str(option) for option in typing.get_args(kind)]
    if choices:
        parts.append("One of: " + ", ".join(choices) + ".")
    notes = [f"unit: {declared.unit}"] if declared.unit else []
    if default is not dataclasses.MISSING and not declared.secret:
        shown = default.value if isinstance(default, Enum) else default
        notes.append(f"default: {'none' if shown is None else repr(shown) if shown == '' else shown}")
    parts.append(f"[{'; '.join(notes)}]" if notes else "[required]" if default is dataclasses.MISSING else "")
    # argparse formats help texts with the % operator.
    return " ".join(part for part in parts if part).replace("%", "%%")


def _from_files(words: list[str], beside_script: bool, filename: str | None, flag: str | None) -> list[str]:
    """Put the words of files first, so that the command line overrides them."""
    files: list[Path] = []
    if filename:
        files.append(Path(filename))
    elif beside_script and sys.argv and sys.argv[0]:
        beside = Path(sys.argv[0]).with_suffix(".args")
        files += [beside] if beside.is_file() else []
    if flag:
        name = flag if flag.startswith("-") else f"--{flag}"
        # Without a --help of its own, which would hide that of the whole parser.
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument(name, dest="files", type=str, action="append", default=[])
        found, words = finder.parse_known_args(words)
        files += [Path(name) for name in found.files]
    read: list[str] = []
    for file in files:
        try:
            read += file.read_text(encoding="utf-8").split()
        except OSError as error:
            what = f"The file cannot be read: {error.strerror}."
            raise ConfigError(what, field="args_filename", value=str(file), remedy="Check the path.") from None
    return read + words


def _unknown(name: str, options: Sequence[str]) -> ConfigError:
    bare = name.split("=")[0]
    return ConfigError("No argument has this name.", field=bare, remedy=suggestion(bare, options, listing=False))
