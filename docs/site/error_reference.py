"""The reference of failures and exit codes, from the classes of `trainer_lib.errors`."""

from __future__ import annotations

import inspect

from trainer_lib import errors

_HEAD = """# Errors and exit codes

Every failure is one class of `trainer_lib.errors`, and ends a command with the exit code of its class. What each means,
and what to do, is on the page [failures](../failures.md); messages that people met are in the [FAQ](../faq.md).

| exit code | class | a kind of | retried | |
|---|---|---|---|---|
"""


def pages() -> dict[str, str]:
    """Return the page, by its file name."""
    classes = [each for each in vars(errors).values() if _is_failure(each)]
    rows = [_row(cls) for cls in sorted(classes, key=lambda cls: cls.exit_code)]
    tree = inspect.cleandoc(errors.__doc__ or "")
    return {"errors.md": f"{_HEAD}{''.join(rows)}\n## The tree\n\n{tree}\n"}


def _is_failure(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, errors.TrainflowError)


def _row(cls: type[errors.TrainflowError]) -> str:
    line = inspect.getdoc(cls) or ""
    parent = cls.__mro__[1].__name__
    retried = "yes" if cls.retryable else "no"
    return f"| {cls.exit_code} | `{cls.__name__}` | `{parent}` | {retried} | {line.splitlines()[0]} |\n"
