"""The running account against a plain count over all manifests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from snapshots_samples import manifest, reference

from agentenv.snapshots.account import Account
from agentenv.snapshots.manifest import SnapshotManifest

_LAYERS = [reference(bytes(size)) for size in range(1, 8)]


@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.none(), max_size=6), max_size=6), st.data())
def test_the_total_is_that_of_a_plain_count(rounds: list[dict[str, None]], data: st.DataObject) -> None:
    made: dict[str, SnapshotManifest] = {}
    account = Account()
    for present in rounds:
        for name in present:
            if name not in made:
                chosen = data.draw(st.lists(st.sampled_from(_LAYERS), min_size=2, max_size=7, unique=True))
                made[name] = manifest(name, memory_layers=tuple(chosen[:1]), disk_layers=tuple(chosen[1:]))
        total = account.update(present, made.__getitem__)
        held = {layer for name in present for layer in made[name].layers}
        states = sum(state.size for name in present if (state := made[name].state))
        assert total == sum(layer.size for layer in held) + states
        assert account.added_by(_LAYERS) == sum(layer.size for layer in _LAYERS if layer not in held)


def test_what_cannot_be_read_is_asked_for_again() -> None:
    account = Account()
    assert account.update(["one"], lambda _: None) == 0
    assert account.update(["one"], manifest) > 0
    assert account.update([], manifest) == 0
