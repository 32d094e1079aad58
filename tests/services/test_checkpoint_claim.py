"""A checkpoint's folder has one writer, also when several find what a dead one left."""

from __future__ import annotations

from dataclasses import replace

from trainer_lib.locks import claim
from trainer_lib.locks.lease import Holder
from trainer_lib.storage import Store


def dead() -> Holder:
    return replace(Holder.this_process(), started="long ago")


def alive(other: Holder) -> bool:
    return other.is_alive()


def test_the_first_one_has_it_and_gives_it_back(any_store: Store) -> None:
    one, two = Holder.this_process(), Holder.this_process()
    assert claim.read_claim(any_store) is None
    assert claim.claim_folder(any_store, one, alive) is None
    assert claim.claim_folder(any_store, two, alive) == one
    assert claim.holds_claim(any_store, one)
    assert not claim.holds_claim(any_store, two)
    claim.release_claim(any_store)
    assert any_store.list() == []
    assert claim.claim_folder(any_store, two, alive) is None


def test_the_dead_are_succeeded_by_one_and_their_claims_go_with_its(any_store: Store) -> None:
    for content in (b"torn", b"x" * 10_000, dead().to_bytes()):
        any_store.write_bytes(claim.WRITING, content)
        second = dead()
        assert claim.claim_folder(any_store, second, alive) is None
        one, two = Holder.this_process(), Holder.this_process()
        assert claim.claim_folder(any_store, one, alive) is None
        assert claim.claim_folder(any_store, two, alive) == one
        assert claim.read_claim(any_store) == one
        assert not claim.holds_claim(any_store, second)
        any_store.write_bytes("WRITING.00000000000000000000000000000000.json", b"a stray")
        assert len(any_store.list()) == 4
        assert all(claim.is_claim(info.path) for info in any_store.list())
        claim.release_claim(any_store)
        assert any_store.list() == []


def test_who_was_asked_twice_by_its_client_still_has_it(any_store: Store) -> None:
    one = Holder.this_process()
    assert claim.claim_folder(any_store, one, alive) is None
    assert claim.claim_folder(any_store, one, alive) is None
    assert claim.holds_claim(any_store, one)


def test_what_looks_alike_is_no_claim() -> None:
    for name in ("WRITING", "WRITING.1.json", "x/WRITING.json", "WRITING.json.tmp", "model.safetensors"):
        assert not claim.is_claim(name)
