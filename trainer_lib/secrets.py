"""What a secret is: one vocabulary for specs, arguments, trackers, logs, checkpoints and errors.

A secret is recognized by its name (``hub_token``, ``wandbApiKey``, ``PGPASSWORD``), by the form of well-known tokens,
as the user part or a signature of a URL, after ``Bearer`` or ``password=``, or because it is the value of an
environment variable with a secret's name. Two questions are asked of a name:

* `is_secret_name`: surely a secret. A spec that holds one is refused.
* `may_be_secret_name`: perhaps a secret. Its value is masked wherever it would be stored or shown.

A *text token* (``pad_token``, ``image_token``) and a number of tokens (``max_token``) are not secrets.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"

_WORDS = frozenset(
    {"secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "privatekey"}
)
# "key" alone may be any mapping's; after one of these words it opens something.
_KEYS = frozenset({"api", "access", "private", "secret", "auth", "encryption", "signing"})
_VENDORS = frozenset(
    {"hub", "hf", "huggingface", "github", "gitlab", "gh", "wandb", "mlflow", "comet", "neptune", "clearml", "dagshub"}
    | {"swanlab", "aws", "azure", "gcp", "openai", "anthropic", "slack"}
)
_GRANTS = _VENDORS | {"auth", "access", "api", "session", "bearer", "refresh", "oauth", "tracking", "security", "login"}
# Words that make a token a piece of text, or a count of them.
_TEXT_TOKENS = frozenset(
    {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "start", "end", "special", "extra", "image", "audio", "video"}
    | {"stop", "blank", "prompt", "placeholder", "trigger", "instance", "newline", "begin", "forced", "decoder"}
    | {"num", "max", "min", "per", "next", "first", "last"}
)
# The variables in which the tools themselves look.
_VARIABLES = {
    "token": "HF_TOKEN",
    "hub_token": "HF_TOKEN",
    "push_to_hub_token": "HF_TOKEN",
    "hf_token": "HF_TOKEN",
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
}
# Tokens by their prefixes: Hugging Face, GitHub, GitLab, Slack, AWS, OpenAI and Anthropic, Google, PyPI; signed JSON.
_KNOWN_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9_]{20,}|github_pat_\w{20,}|xox[abprs]-[\w-]{10,}"
    r"|gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[\w-]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    # Not every text that begins so: "sk-en" is a pair of languages.
    r"|sk-(?:proj|ant|svcacct|admin|or)-[\w-]{20,}|sk-[A-Za-z0-9]{32,}|AIza[\w-]{35}|ya29\.[\w-]{20,}|pypi-[\w-]{20,}"
    r"|eyJ[\w-]{8,4096}\.eyJ[\w-]{8,}\.[\w-]{8,})"
)
# Connection strings: ``AccountKey=…`` of Azure, ``password=…`` of databases.
_ASSIGNED = re.compile(
    r"(?i)\b(accountkey|sharedaccesskey|sharedaccesssignature|(?:\w*_)?(?:passw(?:or)?d|pwd|secret|api_?key))=(?!\*\*\*)"
    r"[^;,&\s'\"<>)}\]]{4,}"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)", re.DOTALL)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_PASSWORD_IN_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/@\s:]*:(?!\*\*\*@)[^/@\s]+@")
_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s'\"]+)")
# Parameters of signed links, as object stores make them.
_SIGNATURES = frozenset({"sig", "signature"})
# A word alone ("the bearer certificate") is not one: a digit, or twenty characters.
_AUTHORIZATION = re.compile(
    r"(?i)(\bauthorization['\"]?:\s*['\"]?(?:\w+\s+)?|\bbearer\s+)(?!\*\*\*)"
    r"(?=[^\s'\",}]*\d|[^\s'\",}]{20})[^\s'\",}]{8,}"
)
_PLACEHOLDER = re.compile(r"<\w+>")


def is_secret_name(name: str) -> bool:
    """Return whether the value under `name` is surely a secret: its last words say so."""
    words = _words_of(name)
    if words[-1:] == ["id"]:
        words = words[:-1]  # access_key_id
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    return (
        words[-1] in _WORDS
        or words[-1].endswith(("password", "passwd"))  # PGPASSWORD
        or (words[-1] == "key" and before in _KEYS | _VENDORS)
        or (words[-1] == "token" and (not before or before in _GRANTS))
    )


def may_be_secret_name(name: str) -> bool:
    """Return whether the value under `name` is surely or perhaps a secret."""
    words = _words_of(name)
    if not words:
        return False
    # "tokens" in the plural is a count and never masked.
    if words[-1] == "token" and not _TEXT_TOKENS & set(words):
        return True
    pairs = any(first in _KEYS and second == "key" for first, second in itertools.pairwise(words))
    return pairs or bool(_WORDS & set(words)) or is_secret_name(name)


def variable_for(name: str) -> str:
    """Return the environment variable that carries the secret `name` instead."""
    return _VARIABLES.get(name.lower(), name.upper())


def holds_secret(text: str) -> bool:
    """Return whether `text` surely holds a secret: a known token, a private key, a signature, a password in a URL.

    A user name alone in a URL (``ssh://git@host``) is masked where it is shown, and is not a secret.
    """
    found = any(pattern.search(text) for pattern in (_KNOWN_TOKENS, _PRIVATE_KEY, _ASSIGNED, _PASSWORD_IN_URL))
    return found or _mask_parts(text) != text


def holds_token(text: str) -> bool:
    """Return whether `text`, a line of code, holds a well-known token, a private key, or a password in a URL.

    `holds_secret` would also take ``login(password=read_password())`` for one.
    """
    return any(pattern.search(text) for pattern in (_KNOWN_TOKENS, _PRIVATE_KEY, _PASSWORD_IN_URL))


def holds_password_in_url(text: str) -> bool:
    """Return whether a URL anywhere in `text` carries a password."""
    return bool(_PASSWORD_IN_URL.search(text))


def mask(text: str) -> str:
    """Return `text` with `***` for each secret that can be recognized in it."""
    for pattern in (_PRIVATE_KEY, _USER_IN_URL, _KNOWN_TOKENS):
        text = pattern.sub(MASK, text)
    text = _mask_parts(_ASSIGNED.sub(rf"\1={MASK}", text))
    for value in sorted(_environment_secrets(), key=len, reverse=True):  # one may begin with another
        text = text.replace(value, MASK)
    return text


def _mask_parts(text: str) -> str:
    return _AUTHORIZATION.sub(rf"\1{MASK}", _QUERY.sub(_mask_parameter, text))


def _environment_secrets() -> Iterator[str]:
    """The secrets that this process was given: in no text that leaves it, in whatever form a server repeats them."""
    for name, value in os.environ.items():
        # A short value, or one that is a word, would be masked in texts that do not mean it.
        # GOOGLE_APPLICATION_CREDENTIALS is the path of a file.
        if len(value) >= 8 and not value.isalpha() and not value.startswith("/") and _is_secret_variable(name):
            yield value


@functools.lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    words = _words_of(name)
    # Of a variable, any token is one (SLACK_BOT_TOKEN), but for those that are pieces of text.
    return is_secret_name(name) or (words[-1:] == ["token"] and not _TEXT_TOKENS & set(words))


def is_secret(name: str, value: Any) -> bool:
    """Return whether `value` is perhaps a secret by its name: not None, not a truth value, not empty, not masked."""
    if value is None or isinstance(value, bool) or value == "" or not may_be_secret_name(name):
        return False
    return not (isinstance(value, str) and _PLACEHOLDER.fullmatch(value))


def mask_value(name: str, value: Any) -> Any:
    """Return `value` without secrets, at any depth of mappings and lists.

    A value whose name, or that of a mapping around it, may be that of a secret becomes ``<NAME>``, the form of
    `TrainingArguments.to_dict`; in other texts only the secret part becomes `***`.
    """
    if isinstance(value, Mapping):
        # Everything below a secret's name is secret: {"credentials": {"user": ...}}.
        around = name if may_be_secret_name(name) else None
        return {key: mask_value(str(key) if around is None else around, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_value(name, inner) for inner in value]
    if is_secret(name, value):
        return f"<{name.upper()}>"
    return mask(value) if isinstance(value, str) else value


def _mask_parameter(found: re.Match[str]) -> str:
    name, value = found.groups()
    secret = may_be_secret_name(name) or bool(_SIGNATURES & set(_words_of(name)))
    return f"{name}={MASK if secret else value}"


def _words_of(name: str) -> list[str]:
    """`awsSecretAccessKey` and `AWS_SECRET_ACCESS_KEY` have the same words."""
    return [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if word]
