"""lineage.json: its bytes are a function of what it says, every byte is sealed, and hostile ones are refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from trainer_lib.errors import ConfigError, DamagedError
from trainer_lib.model_folder.lineage import (
    CheckpointLink,
    Lineage,
    PublicationLink,
    SourceLink,
    StageLink,
    read_lineage,
)
from trainer_lib.model_folder.provenance import make_statement, render_statement
from trainer_lib.storage import FileEntry

A, B, C = "a" * 64, "b" * 64, "c" * 64
LINEAGE = Lineage(
    name="digits",
    sources=(SourceLink(source="package:scikit-learn", digest=A),),
    stages=(
        StageLink(stage="prepare-data", key=A, content_digest=B),
        StageLink(stage="train", key=B, content_digest=C, inputs={"prepare-data": B}),
    ),
    checkpoints=(CheckpointLink(name="checkpoint-8", step=8, content_digest=C),),
    exported="checkpoint-8",
    tracked_run="f35beed5",
    arguments={"learning_rate": 0.1},
    versions={"python": "3.11.9", "torch": "2.13.0", "processor": "one"},
    publication=PublicationLink(revision="00001-abc", content_digest=A),
    files=(FileEntry("model.safetensors", 184, B),),
)


def _sealed(**changed: Any) -> bytes:
    """A file with other fields and a seal that fits: what a hostile writer makes."""
    record = {**json.loads(LINEAGE.to_json()), **changed}
    record.pop("seal")
    seal = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return json.dumps({**record, "seal": seal}).encode()


def test_it_is_read_as_it_was_written() -> None:
    assert read_lineage(LINEAGE.to_json(), "x") == LINEAGE
    assert read_lineage(_sealed(newer=[1]), "x") == LINEAGE


def test_a_changed_byte_is_noticed_wherever_it_is() -> None:
    data = LINEAGE.to_json()
    refused = 0
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        try:
            # Spaces between the fields carry nothing.
            assert read_lineage(bytes(changed), "x") == LINEAGE, position
        except (ConfigError, DamagedError):
            refused += 1
    assert refused > 0.9 * len(data.replace(b" ", b""))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"files": [{"path": "../../etc/passwd", "size": 1, "sha256": A}]}, r"an empty part, '\.' or '\.\.'"),
        ({"files": [{"path": "/etc/passwd", "size": 1, "sha256": A}]}, "is absolute"),
        ({"files": [{"path": "a", "size": "1", "sha256": A}]}, "another form"),
        ({"files": [{"path": "a", "size": 1, "sha256": "short"}]}, "not a SHA-256"),
        ({"stages": [{"stage": "../train", "key": A}]}, "not a name"),
        ({"stages": [{"stage": "train", "key": "http://elsewhere"}]}, "not a SHA-256"),
        ({"stages": [{"stage": "train", "key": A}, {"stage": "train", "key": B}]}, "twice"),
        ({"stages": "train"}, "another form"),
        ({"checkpoints": [{"name": "../../x", "step": 1, "content_digest": A}]}, "not one"),
        ({"run": "../../elsewhere"}, "not a name"),
        ({"publication": {"revision": "http://elsewhere/x", "content_digest": A}}, "not a name"),
        ({"name": None}, "another form"),
    ],
)
def test_a_hostile_one_is_bad_input(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        read_lineage(_sealed(**changed), "s3://bucket/lineage.json")
    assert refused.value.field == "s3://bucket/lineage.json"
    assert refused.value.exit_code == 2
    assert refused.value.remedy


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"NaN", b"{}"])
def test_what_is_no_lineage_is_bad_input(data: bytes) -> None:
    with pytest.raises(ConfigError, match="The lineage"):
        read_lineage(data, "x")


def test_no_secret_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-v4lue")
    token = "hf_" + "a" * 30
    lineage = replace(
        LINEAGE,
        sources=(SourceLink(source=f"https://user:pass1234@host/x?sig={token}", digest=A),),
        arguments={"hub_token": "abcdefgh", "note": f"{token} and s3cr3t-v4lue"},
    )
    for data in (lineage.to_json(), render_statement(lineage)):
        for secret in (b"pass1234", token.encode(), b"abcdefgh", b"s3cr3t-v4lue"):
            assert secret not in data
    read_lineage(lineage.to_json(), "x")


def test_the_provenance_is_a_statement_of_in_toto_with_the_predicate_of_slsa() -> None:
    statement = make_statement(LINEAGE)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    own = hashlib.sha256(LINEAGE.to_json()).hexdigest()
    assert statement["subject"] == [
        {"name": "lineage.json", "digest": {"sha256": own}},
        {"name": "model.safetensors", "digest": {"sha256": B}},
    ]
    predicate = statement["predicate"]
    assert set(predicate) == {"buildDefinition", "runDetails"}
    assert set(predicate["buildDefinition"]) == {
        "buildType",
        "externalParameters",
        "internalParameters",
        "resolvedDependencies",
    }
    assert set(predicate["runDetails"]) == {"builder", "metadata", "byproducts"}
    assert json.loads(render_statement(LINEAGE)) == statement
