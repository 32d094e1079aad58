"""Secrets: one vocabulary for specs, arguments, trackers, logs, checkpoints and errors.

A secret is recognized by its name (``hub_token``, ``wandbApiKey``, ``PGPASSWORD``), by the form of well-known tokens,
as the user part or a signature of a URL, after ``Bearer``, ``Basic``, ``password=`` or an option (``mysql -p``), or
because it is the value of an environment variable with a secret's name. Two questions are asked of a name:

* `is_secret_name`: surely a secret. A spec that holds one is refused.
* `may_be_secret_name`: perhaps a secret. Its value is masked wherever it would be stored or shown.

A *text token* (``pad_token``, ``image_token``) and a number of tokens (``max_token``) are not secrets.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import urllib.parse
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
# What else ends the name of a variable with a secret, and what follows such an end (DB_PASSWORD_PROD).
_VARIABLE_ENDINGS = frozenset({"pass", "pwd", "auth", "pat", "sas", "dsn", "creds", "webhook"})
_VARIABLE_PAIRS = (["webhook", "url"], ["connection", "string"], ["auth", "string"])
_TAILS = frozenset({"prod", "production", "staging", "dev", "test", "live", "old", "new", "b64", "1", "2", "v1", "v2"})
# The variables in which the tools themselves look.
_VARIABLES = {
    "token": "HF_TOKEN",
    "hub_token": "HF_TOKEN",
    "push_to_hub_token": "HF_TOKEN",
    "hf_token": "HF_TOKEN",
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
}
# Written after the formats that the vendors describe in public; bounded, so that each text is read once.
_TOKENS = (
    # Models, data, experiments.
    r"hf_[A-Za-z0-9]{20,}|r8_\w{36,}|gsk_\w{40,}|pplx-\w{40,}|xai-\w{60,}",
    r"dapi[0-9a-f]{32}|pn[ub]_\w{30,}|wandb_v\d_\w{40,}",
    # Not every text that begins so: "sk-en" is a pair of languages.
    r"sk-(?:proj|ant|svcacct|admin|or)-[\w-]{20,}|sk-[A-Za-z0-9]{32,}",
    # Code and packages.
    r"gh[pousr]_\w{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[\w-]{20,}",
    r"AT(?:ATT3|BB)[\w=-]{28,}",
    r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{20,}|rubygems_[0-9a-f]{48}|dckr_[po]at_[\w-]{20,}",
    r"PMAK-[0-9a-f-]{40,}|lin_api_\w{32,}",
    # Clouds and their tools.
    r"(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}",
    r"do[opr]_v1_[0-9a-f]{40,}|\w{3}\dQ~[\w.~-]{31,}",
    r"hv[sbr]\.[\w-]{20,}|\w{14}\.atlasv1\.[\w-]{40,}|pul-[0-9a-f]{40}|dp\.[a-z]{2,8}\.\w{40,}",
    r"glsa_\w{32,}|glc_\w{32,}|NRAK-\w{20,}",
    r"sntry[su]_[\w=+/-]{20,}|AGE-SECRET-KEY-1\w{50,}|pscale_(?:tkn|pw|oauth)_[\w-]{20,}",
    r"sbp_[0-9a-f]{40}|dt0c01\.\w{24}\.\w{40,}",
    # Payments, mail, messages.
    r"(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}|whsec_[\w+/=-]{20,}|sq0[a-z]{3}-[\w-]{20,}",
    r"shp(?:at|ca|pa|ss)_[0-9a-f]{32}",
    r"SG\.[\w-]{16,64}\.[\w-]{16,}|SK[0-9a-f]{32}\b|key-[0-9a-f]{32}\b|[0-9a-f]{32}-us\d{1,2}\b",
    r"figd_[\w-]{30,}|ntn_\w{40,}",
    r"xox[abeoprs]-[\w-]{10,}|xapp-\d-[\w-]{20,}|https://hooks\.slack(?:-gov)?\.com/[a-z]{1,20}/[\w/-]{20,}",
    r"https://(?:\w{1,20}\.)?discord(?:app)?\.com/api/webhooks/[\w/-]{20,}",
    r"https://[\w-]{1,60}\.webhook\.office\.com/[\w@/-]{20,}",
    # Signed JSON.
    r"eyJ[\w-]{8,4096}\.eyJ[\w-]{8,}\.[\w-]{8,}",
)
# No token is shorter, and most words of a log are. A bot of Telegram follows the word "bot" in an address.
_KNOWN_TOKENS = re.compile(rf"\b(?=[\w.~:/=+-]{{15}})(?:{'|'.join(_TOKENS)})|(?<!\d)\d{{8,10}}:[\w-]{{35}}(?![\w-])")
# Passwords as options of programs, and in a netrc.
_OPTION = re.compile(
    r"(\b(?:mysql|mariadb)[\w-]{0,20}\b[^\n|;]{0,120}?\s-p|\bsshpass\s{1,9}-p\s{0,9}|\bredis-cli\b[^\n|;]{0,120}?\s-a\s{1,9}"
    r"|\bcurl\b[^\n|;]{0,120}?\s(?:-u\s{0,9}|--user[= ])[^\s:]{1,64}:(?!//)"
    r"|\blogin\s{1,9}\S{1,64}\s{1,9}password\s{1,9}"
    r"|(?<![\w-])--(?!(?:max|min|num|pad|eos|bos|unk|sep|cls|mask|image|stop)[_-])(?:[a-z]{1,20}[_-])?"
    r"(?:password|passwd|token|secret|api[_-]key|access[_-]key)"
    r"(?:[= ]|['\"],\s?['\"])(?=[^\s'\"]{0,99}\d|[^\s'\"]{20}))(?!\*\*\*)[^\s'\"]{3,}"
)
# Connection strings: ``AccountKey=…`` of Azure, ``password=…`` of databases; variables, and members of JSON.
_ASSIGNED = re.compile(
    r"(?i)(\b(?:accountkey|sharedaccesskey|sharedaccesssignature|sshpass|rediscli_auth"
    r"|(?:\w*_)?(?:passw(?:or)?d|pwd|secret|api_?key))="
    r"|['\"][\w-]{0,40}(?:passw(?:or)?d|passphrase|secret|api_?key|private_?key)['\"]: ?['\"])"
    r"(?!\*\*\*)[^;,&\s'\"<>)}\]]{4,}"
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)", re.DOTALL)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_PASSWORD_IN_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]{0,30}://[^/@\s:]*:(?!\*\*\*@)[^/@\s]+@")
_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s'\"]+)")
# Parameters of signed links, as object stores make them.
_SIGNATURES = frozenset({"sig", "signature"})
# A word alone ("the bearer certificate") is not one: a digit, or twenty characters.
_AUTHORIZATION = re.compile(
    r"(?i)(\bauthorization['\"]?:\s{0,9}['\"]?(?:basic|digest)\s{1,9})(?!\*\*\*)[^\s'\",}]{4,}"
    r"|(\bauthorization['\"]?:\s{0,9}['\"]?(?:\w{1,40}\s{1,9})?|\bbearer\s{1,9}"
    r"|(?-i:\bBasic) (?=[\w+/]{8,99}[\d=]))(?!\*\*\*)"
    r"(?=[^\s'\",}]{0,4096}\d|[^\s'\",}]{20})[^\s'\",}]{8,}"
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
    found = any(pattern.search(text) for pattern in (_KNOWN_TOKENS, _PRIVATE_KEY, _ASSIGNED, _OPTION, _PASSWORD_IN_URL))
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
    text = _mask_parts(_ASSIGNED.sub(rf"\1{MASK}", _OPTION.sub(rf"\1{MASK}", text)))
    for value in sorted(_environment_secrets(), key=len, reverse=True):  # one may begin with another
        text = text.replace(value, MASK)
    return text


def _mask_parts(text: str) -> str:
    return _AUTHORIZATION.sub(lambda found: f"{found[1] or found[2]}{MASK}", _QUERY.sub(_mask_parameter, text))


def _environment_secrets() -> Iterator[str]:
    """The secrets that this process was given: in no text that leaves it, in whatever form a server repeats them."""
    for name in os.environ:
        value = os.environ.get(name, "")  # a trainer in another thread may have removed it
        if _is_secret_variable(name) and _is_telling(value) and not (value.startswith("/") and "CREDENTIALS" in name):
            yield value
            # As it stands in an address.
            if (quoted := urllib.parse.quote(value, safe="")) != value:
                yield quoted


@functools.lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    words = _words_of(name)
    while words and words[-1] in _TAILS:
        words.pop()
    # Of a variable, any token is one (SLACK_BOT_TOKEN), but for those that are pieces of text.
    is_token = words[-1:] == ["token"] and not _TEXT_TOKENS & set(words)
    ending = words[-1] if len(words) > 1 else ""  # PWD alone is the working directory
    is_named = ending in _VARIABLE_ENDINGS or words[-2:] in _VARIABLE_PAIRS or words == ["sshpass"]
    return is_token or is_named or is_secret_name("_".join(words))


@functools.lru_cache(maxsize=4096)
def _is_telling(value: str) -> bool:
    """Whether texts that hold the value surely mean it: it is neither a word nor a small number."""
    if value.isalpha():
        return len(value) >= 16 or (len(value) >= 8 and value not in (value.lower(), value.upper(), value.title()))
    is_mixed = any(char.isdigit() for char in value) and any(char.isalpha() for char in value)
    return len(value) >= (6 if is_mixed else 8)


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
