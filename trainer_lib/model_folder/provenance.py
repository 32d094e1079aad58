"""A lineage as an in-toto Statement with SLSA's provenance predicate, version 1: what other tools read and sign.

Source: https://slsa.dev/spec/v1.0/provenance and https://in-toto.io/Statement/v1.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from trainer_lib.model_folder.lineage import FILE as LINEAGE_FILE
from trainer_lib.model_folder.lineage import Lineage, StageLink
from trainer_lib.secrets import mask_value

FILE = "provenance.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:trainflow:pipeline:v1"
CONTENT = "trainflowContent"
"""Name of a digest that is not of a file: SHA-256 over one line `path NUL size NUL sha256` for each file."""
SOURCE = "trainflowSource"
"""Name of a digest that is of a source as declared: of many files, or a server's tag."""


def make_statement(lineage: Lineage) -> dict[str, Any]:
    """The statement about the files of a lineage's folder, the lineage among them."""
    own = hashlib.sha256(lineage.to_json()).hexdigest()
    files = {**{entry.path: entry.sha256 for entry in lineage.files}, LINEAGE_FILE: own}
    packages = {name: version for name, version in lineage.versions.items() if name != "processor"}
    metadata = {} if lineage.tracked_run is None else {"invocationId": lineage.tracked_run}
    checkpoints = [
        {"name": each.name, "digest": {CONTENT: each.content_digest}, "annotations": {"step": each.step}}
        for each in lineage.checkpoints
    ]
    statement: dict[str, Any] = {
        "_type": STATEMENT,
        "subject": [{"name": path, "digest": {"sha256": digest}} for path, digest in sorted(files.items())],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"name": lineage.name, "arguments": lineage.arguments},
                "internalParameters": {"versions": lineage.versions},
                "resolvedDependencies": [
                    {"name": each.source, "digest": {SOURCE: each.digest}} for each in lineage.sources
                ],
            },
            "runDetails": {
                "builder": {"id": BUILD_TYPE, "version": packages},
                "metadata": metadata,
                "byproducts": [*(_stage(each) for each in lineage.stages), *checkpoints],
            },
        },
    }
    masked: dict[str, Any] = mask_value("", statement)
    return masked


def render_statement(lineage: Lineage) -> bytes:
    """The contents of the file."""
    return json.dumps(make_statement(lineage), indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _stage(link: StageLink) -> dict[str, Any]:
    digest = {} if link.content_digest is None else {CONTENT: link.content_digest}
    return {"name": link.stage, "digest": {**digest, "trainflowKey": link.key}}
