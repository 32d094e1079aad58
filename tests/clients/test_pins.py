"""The clients are installed at their pinned versions, and none of them needs another version of what we pin."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import clients

pytestmark = pytest.mark.needs("clients")


def test_the_clients_are_the_pinned_ones() -> None:
    found = {canonicalize_name(each.metadata["Name"]): each.version for each in clients.distributions()}
    assert found == {canonicalize_name(name): version for name, version in clients.pins().items()}


def test_what_they_need_is_installed_in_a_version_that_they_take() -> None:
    for each in clients.distributions():
        for text in each.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                version = importlib.metadata.version(needed.name)
                assert version in needed.specifier, f"{each.metadata['Name']} needs {text}; {version} is installed"
