"""Errors in the words of a command: an unknown option, a number out of range. They replace Typer's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, get_args, get_type_hints

import typer

from trainer_lib.base.suggestions import nearest, suggestion
from trainer_lib.errors import ConfigError

# Newer versions of Typer carry a click of their own, so the class is reached through the one that all of them export.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_KINDS: dict[type, str] = {int: "whole number", float: "number"}


def call(app: typer.Typer, words: Sequence[str]) -> NoReturn:
    """Run a command line to its end.

    Raises:
        SystemExit: the command ended; with its exit code.
        ConfigError: the words do not fit the command.
        TrainflowError: what the command raised.
    """
    try:
        code = app(args=list(words), prog_name="trainflow", standalone_mode=False)
    except typer.Abort:
        code = 1
    except _UsageError as error:
        if _is_a(error, "NoArgsIsHelpError"):
            error.show()  # type: ignore[attr-defined]
            raise SystemExit(2) from None
        raise _refusal(error, _context(error, app, words), list(words)) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _is_a(error: Exception, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(error).__mro__)


def _context(error: Any, app: typer.Typer, words: Sequence[str]) -> Any:
    """The context of the command that the words name; the parser raises some errors without it."""
    if error.ctx is not None:
        return error.ctx
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="trainflow")
    for word in words:
        if word in getattr(command, "commands", ()):
            command = command.commands[word]
            context = command.context_class(command, info_name=word, parent=context)
    return context


def _refusal(error: Any, context: Any, words: list[str]) -> ConfigError:
    rest = _behind(context.command_path, words)
    if _is_a(error, "NoSuchOption"):
        return _unknown_option(context, str(error.option_name), rest)
    if _is_a(error, "BadOptionUsage"):
        return _bad_usage(context, str(error.option_name), rest)
    if _is_a(error, "MissingParameter") and error.param is not None:
        return _missing(context, error.param)
    if _is_a(error, "BadParameter") and error.param is not None:
        return _bad_value(context, error.param, rest)
    return _unexpected(context, rest)


def _behind(command: str, words: list[str]) -> list[str]:
    """The words of a command line behind the names of its command."""
    rest = list(words)
    for name in command.split()[1:]:
        if name in rest:
            rest = rest[rest.index(name) + 1 :]
    return rest


def _is_option(param: Any) -> bool:
    return bool(param.param_type_name == "option")


def _typed(name: str, rest: Sequence[str]) -> str:
    """An option as it was written: of `-keep` the parser names `-k` alone."""
    written = [word.partition("=")[0] for word in rest if word.startswith(name)]
    return name if name in written or not written else written[0]


def _unknown_option(context: Any, name: str, rest: Sequence[str]) -> ConfigError:
    typed = _typed(name, rest)
    options = [param.opts for param in context.command.get_params(context) if _is_option(param)]
    close = nearest(typed, [name for names in options for name in names])
    # Of an option with a short name, the list shows the long one.
    remedy = suggestion(typed, [close] if close else [max(names, key=len) for names in options])
    if hasattr(context.command, "commands") and close is None:
        remedy = f"Write it behind the name of a command, if it is an option of one: {context.command_path} COMMAND …."
    return ConfigError(f"{context.command_path} has no such option.", field=typed, remedy=remedy)


def _bad_usage(context: Any, name: str, rest: Sequence[str]) -> ConfigError:
    """An option without the value that it needs, or with one that it does not take."""
    param = next((param for param in context.command.get_params(context) if name in param.opts), None)
    if param is None or not param.is_flag:
        metavar = (param.metavar if param is not None else None) or "VALUE"
        return ConfigError("This option needs a value.", field=name, remedy=f"Write {name} {metavar}.")
    value = next((word.partition("=")[2] for word in rest if word.startswith(f"{name}=")), None)
    return ConfigError("This option takes no value.", field=name, value=value, remedy=f"Write {name} alone.")


def _missing(context: Any, param: Any) -> ConfigError:
    command = context.command_path
    if _is_option(param):
        name = param.opts[0]
        remedy = f"Add it: {name} {param.metavar or 'VALUE'}."
        return ConfigError(f"{command} needs this option.", field=name, remedy=remedy)
    needed = [
        _argument(other) for other in context.command.get_params(context) if other.required and not _is_option(other)
    ]
    remedy = f"Write {command} {' '.join(needed)}."
    return ConfigError(f"{command} needs this argument.", field=_argument(param), remedy=remedy)


def _argument(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _bad_value(context: Any, param: Any, rest: list[str]) -> ConfigError:
    given, _, _ = context.command.make_parser(context).parse_args(list(rest))
    value = given.get(param.name)
    names = [word.partition("=")[0] for word in rest]
    field = next((name for name in param.opts if name in names), param.opts[0])
    kind, low, high = _declared(context.command, param.name)
    if kind is None:
        remedy = f"{context.command_path} --help shows what this takes."
        return ConfigError("This value does not fit.", field=field, value=value, remedy=remedy)
    bounds = {"at least": low, "at most": high}
    words = " and ".join(f"{which} {bound:g}" for which, bound in bounds.items() if bound is not None)
    remedy = f"Give a {_KINDS[kind]} of {words}." if words else f"Give a {_KINDS[kind]}."
    message = f"This is not a {_KINDS[kind]}."
    try:
        number = kind(value)
    except (TypeError, ValueError):
        return ConfigError(message, field=field, value=value, remedy=remedy)
    if low is not None and number < low:
        message = f"The number must be at least {low:g}."
    elif high is not None and number > high:
        message = f"The number must be at most {high:g}."
    return ConfigError(message, field=field, value=value, remedy=remedy)


def _declared(command: Any, name: str) -> tuple[type[Any] | None, float | None, float | None]:
    """The kind of number that a parameter takes, None if none, and its least and greatest value."""
    hint = get_type_hints(command.callback, include_extras=True).get(name)
    plain, *described = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    kind = next((kind for kind in _KINDS if kind is plain or kind in get_args(plain)), None)
    info = next(iter(described), None)
    return kind, getattr(info, "min", None), getattr(info, "max", None)


def _unexpected(context: Any, rest: list[str]) -> ConfigError:
    """A word that is not a command, none where one is needed, or more words than a command takes."""
    command = context.command_path
    _, left, _ = context.command.make_parser(context).parse_args(list(rest))
    if not hasattr(context.command, "commands"):
        taken = "Remove it." if len(left) == 1 else "Remove them."
        return ConfigError(f"{command} takes no further argument.", field=" ".join(left), remedy=taken)
    if not left:
        return ConfigError(f"{command} needs a command.", field="COMMAND", remedy=f"{command} --help lists them.")
    remedy = suggestion(left[0], context.command.list_commands(context))
    return ConfigError(f"{command} has no such command.", field="COMMAND", value=left[0], remedy=remedy)
