"""One vocabulary of what a secret is, and masking by it."""

from __future__ import annotations

import json
import os
import time
import timeit
from urllib.parse import quote

import pytest

from trainer_lib import secrets
from trainer_lib.errors import ConfigError, StorageError

SURE = """
    token hub_token HF_TOKEN push_to_hub_token aws_session_token auth-token githubToken password db_password passwd
    client_secret secretKey aws_secret_access_key credentials api_key wandbApiKey apikey private_key access_key
    AWS_ACCESS_KEY_ID openai_key PGPASSWORD MYSQL_PASSWD
"""
NO_SECRETS = """
    pad_token eos_token num_tokens max_new_tokens tokenizer token_ids image_token max_token pad_token_id
    average_tokens_across_devices include_num_input_tokens_seen instance_token key content_key sort_key key_size
    secretary attention_mask mask_replace_prob
"""
UNITS = ["a", "-", "a_", "mysql -", "curl -u a", "eyJ-aaaaaaaa", "://a:", "-----BEGIN A ", "password", "'password': '"]
UNITS += ["login a password", "Authorization: ", "--token ", "SG.aaaaaaaaaaaaaaaa", "1234567890:", "?a=", '"', "basic "]


@pytest.mark.parametrize(
    ("name", "is_sure", "may_be"),
    [
        *((name, True, True) for name in SURE.split()),
        # Masked, and not refused.
        *((name, False, True) for name in ("deployment_token", "secret_name", "password_file", "api_key_header")),
        *((name, False, False) for name in ("", *NO_SECRETS.split())),
    ],
)
def test_names_are_surely_secrets_may_be_secrets_or_are_none(name: str, is_sure: bool, may_be: bool) -> None:
    assert (secrets.is_secret_name(name), secrets.may_be_secret_name(name)) == (is_sure, may_be)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://me:pw@db:5432/mlflow", "postgresql://***@db:5432/mlflow"),
        ("sqlite:////tmp/a@b/mlflow.db", "sqlite:////tmp/a@b/mlflow.db"),
        ("see hf_" + "a1" * 17 + ".", "see ***."),
        ("GET https://s3/x?X-Amz-Signature=abc&part=2&X-Amz-Security-Token=d", None),
        ("{'Authorization': 'Bearer abcdefgh12345'}", "{'Authorization': 'Bearer ***'}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----\nrest", "***\nrest"),
        ("basic checkpointing of key=value tokens at step 3", "basic checkpointing of key=value tokens at step 3"),
    ],
)
def test_texts_lose_their_secrets_only(text: str, masked: str | None) -> None:
    expected = "GET https://s3/x?X-Amz-Signature=***&part=2&X-Amz-Security-Token=***" if masked is None else masked
    assert secrets.mask(text) == expected
    assert secrets.mask(expected) == expected


def test_values_are_masked_at_any_depth() -> None:
    value = {
        "hub_token": "s3cr3t",
        "args": [{"api_key": "s3cr3t", "pad_token": "<pad>", "max_new_tokens": 5}],
        "credentials": {"user": "me", "pin": 1234},
        "use_auth_token": True,
        "tracking_token": None,
        "url": "http://me:s3cr3t@host/",
    }
    shown = secrets.mask_value("", value)
    assert "s3cr3t" not in json.dumps(shown)
    assert shown["args"] == [{"api_key": "<API_KEY>", "pad_token": "<pad>", "max_new_tokens": 5}]
    assert shown["credentials"] == {"user": "<CREDENTIALS>", "pin": "<CREDENTIALS>"}
    assert (shown["use_auth_token"], shown["tracking_token"]) == (True, None)
    assert secrets.mask_value("", shown) == shown


def test_errors_mask_what_they_are_given() -> None:
    place = "s3://me:" + "s3cr3t" + "@bucket"
    for error in (
        StorageError(f"GET {place} failed.", field="train.args.hub_token", value="s3cr3t"),
        StorageError("It is gone.", field=place, remedy=f"Look at {place}.", details="hf_" + "s3cr3t" * 5),
    ):
        assert "s3cr3t" not in str(error) + json.dumps(error.to_record())
    plain = ConfigError("It is odd.", field="model.pad_token", value="<pad>")
    assert str(plain) == "model.pad_token = <pad>: It is odd."


def test_secrets_are_named_by_their_variable() -> None:
    assert [secrets.variable_for(name) for name in ("hub_token", "wandb_api_key")] == ["HF_TOKEN", "WANDB_API_KEY"]
    assert secrets.holds_password_in_url("s3://me:pw@bucket") and not secrets.holds_password_in_url("s3://bucket/a:b@c")


@pytest.mark.parametrize(
    "text",
    [
        "x AKIA" + "A" * 16,
        "glpat-" + "a1B2" * 6,
        "sk-" + "a1B2" * 8,
        "sk-proj-" + "a1_B2-" * 5,
        "sk-ant-api03-" + "a1B2" * 8,
        "AIza" + "a1B2c" * 7,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "send it with Bearer abcdef123456",
        "https://store/x?X-Amz-Signature=abcdef0123456789",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=bXlrZXk0NTY3ODk=;EndpointSuffix=core",
        "host=db user=me password=hunter22",
        "see postgresql://me:hunter22@db/x for more",
        "-----BEGIN PRIVATE KEY-----\nMII\n",
    ],
)
def test_a_secret_anywhere_in_a_text_is_found_and_masked(text: str) -> None:
    assert secrets.holds_secret(text)
    assert not secrets.holds_secret(secrets.mask(text))
    assert secrets.mask(secrets.mask(text)) == secrets.mask(text)


def test_the_value_of_a_secret_variable_is_masked_in_whatever_form_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct-horse-7")
    monkeypatch.setenv("MY_TOKEN", "correct-horse-77")
    monkeypatch.setenv("HF_TOKEN", "correct-horse-77")
    monkeypatch.setenv("PGPASSWORD", "password")  # a word: it stays in sentences that mean the word
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/etc/keys/gcp1.json")
    assert secrets.mask("the server refused correct-horse-7 as a password") == "the server refused *** as a password"
    assert secrets.mask("correct-horse-77") == "***"
    assert secrets.mask("no file /etc/keys/gcp1.json") == "no file /etc/keys/gcp1.json"
    listed = ["OLD_TOKEN", *os.environ]  # another thread removed the first after it was listed
    monkeypatch.setattr(type(os.environ), "__iter__", lambda _: iter(listed))
    assert secrets.mask("correct-horse-77") == "***"


_MIX = "a1B2c3D4e5F6g7H8i9J0" * 5
_HEX = "0123456789abcdef" * 5
# Vendor -> the parts of a token, which no scanner of this file takes for a real one.
TOKENS = {
    "Stripe": ("sk", "_live_", _MIX[:24]),
    "Stripe, restricted": ("rk", "_test_", _MIX[:24]),
    "Stripe, webhook": ("wh", "sec_", _MIX[:32]),
    "SendGrid": ("SG", ".", _MIX[:22], ".", _MIX[:43]),
    "npm": ("np", "m_", _MIX[:36]),
    "Docker": ("dckr", "_pat_", _MIX[:27]),
    "DigitalOcean": ("dop", "_v1_", _HEX[:64]),
    "Vault": ("hv", "s.", _MIX[:24]),
    "Twilio": ("S", "K", _HEX[:32]),
    "Telegram": ("123456", "7890:", "AA", _MIX[:33]),
    "Telegram, in an address": ("https://api.telegram.org/bot", "123456", "789:", "AA", _MIX[:33], "/sendMessage"),
    "Slack, webhook": ("https://hooks.", "slack.com/services/", "T00000000/B00000000/", _MIX[:24]),
    "Slack, app": ("xa", "pp-1-A0-", _MIX[:40]),
    "Discord": ("https://", "discord.com/api/webhooks/", "12345678901/", _MIX[:60]),
    "Teams": ("https://acme.", "webhook.office.com/webhookb2/", _HEX[:40]),
    "Databricks": ("da", "pi", _HEX[:32]),
    "Prefect": ("pn", "u_", _MIX[:36]),
    "Groq": ("gs", "k_", _MIX[:52]),
    "Replicate": ("r", "8_", _MIX[:37]),
    "Atlassian": ("AT", "ATT3", _MIX[:60]),
    "Google, client": ("GOC", "SPX-", _MIX[:28]),
    "Azure, application": ("abc", "8Q", "~", _MIX[:34]),
    "Terraform": (_MIX[:14], ".atlas", "v1.", _MIX[:60]),
    "Grafana": ("gl", "sa_", _MIX[:32], "_", _HEX[:8]),
    "New Relic": ("NR", "AK-", _MIX[:27].upper()),
    "Mailgun": ("ke", "y-", _HEX[:32]),
    "Mailchimp": (_HEX[:32], "-u", "s12"),
    "Shopify": ("shp", "at_", _HEX[:32]),
    "Sentry": ("sntr", "ys_", _MIX[:50]),
    "Linear": ("lin_", "api_", _MIX[:40]),
    "Figma": ("fig", "d_", _MIX[:40]),
}


@pytest.mark.parametrize("vendor", TOKENS)
def test_tokens_of_many_vendors_are_found_by_their_forms(vendor: str) -> None:
    secret = TOKENS[vendor][-1] if "sendMessage" not in TOKENS[vendor][-1] else TOKENS[vendor][-2]
    for around in ("{}", "see {}.", "{{'a': '{}'}}", "x={}, y", "a\n{}\nb"):
        text = around.format("".join(TOKENS[vendor]))
        assert secrets.holds_secret(text) and secrets.holds_token(text), around
        assert secret not in (masked := secrets.mask(text)), around
        assert secrets.mask(masked) == masked


@pytest.mark.parametrize(
    ("form", "secret"),
    [
        ("Authorization: Basic {}", "bWU6cHc="),
        ("{{'Authorization': 'Basic {}'}}", "dXNlcjpwYXNz"),
        ("Proxy-Authorization: Basic {}", "dXNlcjpwYXNz"),
        ("Authorization: Digest {}", "secretvalue"),
        ("sent Basic {} to it", "dXNlcjpwYXNzd29yZDEy"),
        ("mysql -u root -p{} db", "hunter"),
        ("mysqldump --host=h -p{}", "hunter22"),
        ("mariadb -p{}", "hunter22"),
        ("SSHPASS={} ssh host", "hunter"),
        ("sshpass -p {} ssh host", "hunter"),
        ("REDISCLI_AUTH={} redis-cli", "hunter"),
        ("redis-cli -h host -a {} ping", "hunter22"),
        ("curl -u me:{} https://h", "hunter22"),
        ("curl --user me:{} https://h", "hunter22"),
        ("psql --password={}", "hunter22"),
        ("tool --api-key {} run", "hunter22"),
        ("['--hub_token', '{}']", "hunter22hunter"),
        ("machine h login me password {}", "hunter"),
        ('{{"password": "{}"}}', "hunter"),
        ("{{'db_password': '{}'}}", "hunter"),
        ("https://me:{}@host/x", "hunter"),
        ("redis://:{}@host:6379/0", "hunter"),
        ("amqp://me:{}@host", "p%40ss"),
    ],
)
def test_passwords_in_headers_and_commands_are_masked(form: str, secret: str) -> None:
    text = form.format(secret)
    assert secrets.holds_secret(text)
    assert secret not in secrets.mask(text)
    assert secrets.mask(secrets.mask(text)) == secrets.mask(text)


ALIKE = """
    hf_model | sk-learn | AIza | risk-adjusted-return-on-capital | s3://bucket/a:b@c | password= |
    bearer of news | https://h/x?part=2 | eyJ is a prefix | api_key=<API_KEY> |
    mysql --port=3306 --protocol tcp | mkdir -p folder | pass -p for plain output | the basic tutorial of it |
    basic internationalization | --max_token 512 | --pad-token=0 | --password is required | Basic auth is off |
    npm_config_cache | SG.1 | key-value | hvs. | dop_v1_ | 12:30:45 | 1732580000:eval | sk_live | dapi |
    https://hooks.slack.com/ | https://discord.com/channels/1/2 | whsec | glsa | AGE-SECRET | login the password |
    {"pad_token": "<pad>"} | checkpoint-100 | curl -u https://h | 12345678-1234-1234-1234-123456789abc |
    git@github.com:org/repo | PWD= | tokenizer --token_ids 5
"""


@pytest.mark.parametrize(
    "text", [*(" ".join(each.split()) for each in ALIKE.split("|")), "a" * 64, _HEX[:32], f"sha256:{_HEX[:64]}"]
)
def test_what_only_resembles_a_token_or_a_password_stays(text: str) -> None:
    assert not secrets.holds_secret(text)
    assert secrets.mask(text) == text
    for masked in ("token=abcdefgh", "ssh://git@host/repo"):  # to be safe
        assert not secrets.holds_secret(masked)


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("SSHPASS", "hunter2", True),
        ("REDISCLI_AUTH", "hunter2hunter", True),
        ("MYSQL_PWD", "p@ss word", True),
        ("FTP_PASS", "abc!defgh", True),
        ("DB_PASSWORD_PROD", "hunter22", True),
        ("SENTRY_DSN", "https://abc@o1.h/2", True),
        ("GH_PAT", "hunter-22", True),
        ("X_SAS", "a=b&c=defg", True),
        ("TEAM_WEBHOOK_URL", "https://h.example/T0/B0", True),
        ("AZURE_CONNECTION_STRING", "A=b;C=defghi", True),
        ("AWS_SECRET_ACCESS_KEY", "/abc/def+ghij", True),
        ("MY_TOKEN_2", "hunter22", True),
        ("APP_SECRET", "HunterHunter", True),
        ("VAULT_PASSPHRASE", "correcthorsebatterystaple", True),
        ("PREFECT_SERVER_API_AUTH_STRING", "me:hunter", True),
        ("PWD", "/home/me/project7", False),
        ("OLDPWD", "/home/me/project7", False),
        ("SSH_AUTH_SOCK", "/tmp/agent.7", False),
        ("TERM", "xterm-256", False),
        ("APP_AUTH", "disabled", False),
        ("MAX_TOKEN", "12345678", False),
        ("PYTHONPATH", "/a/b/c/d7", False),
        ("DB_PASS", "1234", False),
    ],
)
def test_the_value_of_every_variable_that_says_so_is_masked(
    name: str, value: str, is_secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    if not is_secret:
        assert secrets.mask(f"in {value} now") == f"in {value} now"
        return
    for form in (value, quote(value, safe=""), f"<{value}>"):
        masked = secrets.mask(f"it sent {form} there")
        assert value not in masked and quote(value, safe="") not in masked


@pytest.mark.parametrize("unit", [*UNITS, "0123abcd-us"])
def test_masking_takes_linear_time(unit: str) -> None:
    def seconds(size: int, repeat: int) -> float:
        return min(
            timeit.repeat(lambda: secrets.mask((unit * size)[:size]), timer=time.process_time, repeat=repeat, number=1)
        )

    assert seconds(80_000, 1) < 12 * seconds(20_000, 3) + 0.05  # four times the text; sixteen times would be quadratic
