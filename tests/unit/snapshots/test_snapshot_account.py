"""The running account against a plain count over all manifests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from snapshots_samples import manifest, reference

from agentenv.snapshots.account import Account
from agentenv.snapshots.manifest import SnapshotManifest

_LAYERS = [reference(bytes(size)) for size in range(1, 8)]


@given(st.lists(st.sampled_from("abcdef"), max_size=20), st.data())
def test_the_total_is_that_of_a_plain_count(changes: list[str], data: st.DataObject) -> None:
    present: dict[str, SnapshotManifest] = {}
    account = Account()
    for name in changes:
        if name in present:
            account.removed(present.pop(name))
        else:
            chosen = data.draw(st.lists(st.sampled_from(_LAYERS), min_size=2, max_size=7, unique=True))
            present[name] = manifest(name, memory_layers=tuple(chosen[:1]), disk_layers=tuple(chosen[1:]))
            account.added(present[name])
        held = {layer for made in present.values() for layer in made.layers}
        states = sum(state.size for made in present.values() if (state := made.state))
        assert account.total() == sum(layer.size for layer in held) + states
        free = data.draw(st.sets(st.sampled_from(_LAYERS)))
        digests = [layer.digest for layer in free]
        assert account.total(digests) == sum(layer.size for layer in held - free) + states
        assert account.added_by(_LAYERS, digests) == sum(layer.size for layer in set(_LAYERS) - held - free)
        assert account.added_by(_LAYERS) == sum(layer.size for layer in _LAYERS if layer not in held)
