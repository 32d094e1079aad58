"""One vocabulary of what a secret is, and masking by it."""

from __future__ import annotations

import json

import pytest

from trainer_lib.errors import ConfigError, StorageError
from trainer_lib.secrets import (
    holds_password_in_url,
    holds_secret,
    is_secret_name,
    mask,
    mask_value,
    may_be_secret_name,
    variable_for,
)


@pytest.mark.parametrize(
    "name",
    [
        *("token", "hub_token", "HF_TOKEN", "push_to_hub_token", "aws_session_token", "auth-token", "githubToken"),
        *("password", "db_password", "passwd", "client_secret", "secretKey", "aws_secret_access_key", "credentials"),
        *("api_key", "wandbApiKey", "apikey", "private_key", "access_key", "AWS_ACCESS_KEY_ID", "openai_key"),
    ],
)
def test_these_names_are_surely_secrets(name: str) -> None:
    assert is_secret_name(name) and may_be_secret_name(name)


@pytest.mark.parametrize("name", ["deployment_token", "secret_name", "password_file", "api_key_header"])
def test_these_names_may_be_secrets_so_that_they_are_masked_but_not_refused(name: str) -> None:
    assert may_be_secret_name(name) and not is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "pad_token",
            "eos_token",
            "num_tokens",
            "max_new_tokens",
            "tokenizer",
            "token_ids",
            "image_token",
            "max_token",
        ),
        *("pad_token_id", "average_tokens_across_devices", "include_num_input_tokens_seen", "instance_token"),
        *("key", "content_key", "sort_key", "key_size", "secretary", "attention_mask", "", "mask_replace_prob"),
    ],
)
def test_these_names_are_not_secrets(name: str) -> None:
    assert not may_be_secret_name(name) and not is_secret_name(name)


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
    assert mask(text) == expected
    assert mask(expected) == expected


def test_values_are_masked_at_any_depth() -> None:
    value = {
        "hub_token": "s3cr3t",
        "args": [{"api_key": "s3cr3t", "pad_token": "<pad>", "max_new_tokens": 5}],
        "credentials": {"user": "me", "pin": 1234},
        "use_auth_token": True,
        "tracking_token": None,
        "url": "http://me:s3cr3t@host/",
    }
    shown = mask_value("", value)
    assert "s3cr3t" not in json.dumps(shown)
    assert shown["args"] == [{"api_key": "<API_KEY>", "pad_token": "<pad>", "max_new_tokens": 5}]
    assert shown["credentials"] == {"user": "<CREDENTIALS>", "pin": "<CREDENTIALS>"}
    assert (shown["use_auth_token"], shown["tracking_token"]) == (True, None)
    assert mask_value("", shown) == shown


def test_errors_mask_what_they_are_given() -> None:
    error = StorageError(
        "GET http://me:s3cr3t@host/ failed.", field="train.args.hub_token", value="s3cr3t", details="hf_" + "s3cr3t" * 5
    )
    assert "s3cr3t" not in str(error) + json.dumps(error.to_record())
    assert (
        str(ConfigError("It is odd.", field="model.pad_token", value="<pad>")) == "model.pad_token = <pad>: It is odd."
    )


def test_secrets_are_named_by_their_variable_and_recognized_by_their_form() -> None:
    assert [variable_for(name) for name in ("hub_token", "wandb_api_key")] == ["HF_TOKEN", "WANDB_API_KEY"]
    assert holds_password_in_url("s3://me:pw@bucket") and not holds_password_in_url("s3://bucket/a:b@c")


SECRETS = [
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
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_anywhere_in_a_text_is_found_and_masked(text: str) -> None:
    assert holds_secret(text)
    assert not holds_secret(mask(text))
    assert mask(mask(text)) == mask(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "hf_model",
            "sk-learn",
            "AIza",
            "risk-adjusted-return-on-capital",
            "ssh://git@host/repo",
            "s3://bucket/a:b@c",
        ),
        *(
            "password=",
            "token=abcdefgh",
            "bearer of news",
            "https://h/x?part=2",
            "eyJ is a prefix",
            "api_key=<API_KEY>",
        ),
    ],
)
def test_a_text_that_only_looks_like_a_secret_is_not_one(text: str) -> None:
    assert not holds_secret(text)


def test_names_of_variables_are_recognized_without_underscores() -> None:
    assert is_secret_name("PGPASSWORD") and is_secret_name("MYSQL_PASSWD")


def test_the_value_of_a_secret_variable_is_masked_in_whatever_form_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct-horse-7")
    monkeypatch.setenv("MY_TOKEN", "correct-horse-77")
    monkeypatch.setenv("HF_TOKEN", "correct-horse-77")
    monkeypatch.setenv("PGPASSWORD", "password")  # a word: it stays in sentences that mean the word
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/etc/keys/gcp1.json")
    assert mask("the server refused correct-horse-7 as a password") == "the server refused *** as a password"
    assert mask("correct-horse-77") == "***"
    assert mask("no file /etc/keys/gcp1.json") == "no file /etc/keys/gcp1.json"
