"""Any sequence of imports, references, leases and collections: what is used stays whole, all other bytes come back."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from agentenv.storage.layers import LayerStore
from unit.storage.storage_fakes import ToyTools, files_below

OWNERS = st.sampled_from(["template:base", "disk:a", "disk:b", "merge:a"])
CONTENTS = st.integers(0, 5)


class Layers(RuleBasedStateMachine):
    digests = Bundle("digests")

    @initialize()
    def begin(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="aenv-layers-"))
        self.stores = [LayerStore(self.home / "layers", ToyTools()) for _ in range(2)]
        self.references: dict[str, list[str]] = {}
        self.leases: list[tuple[str, ExitStack]] = []
        self.sizes: dict[str, int] = {}

    def teardown(self) -> None:
        if not hasattr(self, "home"):
            return
        try:
            for _, lease in self.leases:
                lease.close()
            for owner in list(self.references):
                self.stores[0].drop(owner)
            self.stores[1].collect_garbage()
            assert self.stores[0].usage().size_bytes == 0
            assert {name for name in files_below(self.home) if "index.db" not in name} == set()
        finally:
            for store in self.stores:
                store.close()
            shutil.rmtree(self.home)

    @rule(target=digests, content=CONTENTS, owner=OWNERS, move=st.booleans(), which=st.integers(0, 1))
    def add(self, content: int, owner: str, move: bool, which: int) -> str:
        file = self.home / "file"
        facts = {"uuid": "u", "parent_uuid": None, "virtual_size": 512, "sealed": True}
        file.write_text(json.dumps({**facts, "blocks": {"0": "x" * content}}))
        layer = self.stores[which].import_file(file, owner=owner, move=move)
        file.unlink(missing_ok=True)
        held = self.references.setdefault(owner, [])
        if layer.digest not in held:
            held.append(layer.digest)
        self.sizes[layer.digest] = layer.size
        return layer.digest

    @rule(owner=OWNERS, chosen=st.lists(digests, max_size=4), which=st.integers(0, 1))
    def refer(self, owner: str, chosen: list[str], which: int) -> None:
        chosen = [digest for digest in chosen if digest in self.present()]
        self.stores[which].set_references(owner, chosen)
        self.references[owner] = chosen

    @rule(source=OWNERS, heir=OWNERS, chosen=st.lists(digests, max_size=4))
    def move(self, source: str, heir: str, chosen: list[str]) -> None:
        if source == heir:
            return
        chosen = [digest for digest in chosen if digest in self.present()]
        self.stores[0].move_references(source, heir, chosen)
        self.references[heir] = chosen
        self.references.pop(source, None)

    @rule(owner=OWNERS, which=st.integers(0, 1))
    def drop(self, owner: str, which: int) -> None:
        self.stores[which].drop(owner)
        self.references.pop(owner, None)

    @rule(digest=digests, which=st.integers(0, 1))
    def lease(self, digest: str, which: int) -> None:
        if digest in self.present() and len(self.leases) < 4:
            stack = ExitStack()
            stack.enter_context(self.stores[which].lease([digest]))
            self.leases.append((digest, stack))

    @rule()
    def end_lease(self) -> None:
        if self.leases:
            self.leases.pop(0)[1].close()

    @rule(which=st.integers(0, 1))
    def collect(self, which: int) -> None:
        before = self.present()
        report = self.stores[which].collect_garbage()
        assert set(report.removed) == before - self.used()
        assert report.freed_bytes == sum(self.sizes[digest] for digest in report.removed)
        assert self.present() == self.used()

    def present(self) -> set[str]:
        return {layer.digest for layer in self.stores[0].list()}

    def used(self) -> set[str]:
        referenced = {digest for digests in self.references.values() for digest in digests}
        return referenced | {digest for digest, _ in self.leases}

    @invariant()
    def what_is_used_is_whole(self) -> None:
        if not hasattr(self, "home"):
            return
        for digest in self.used():
            self.stores[1].verify(digest)
        for owner, digests in self.references.items():
            assert self.stores[1].references(owner) == tuple(digests)
        files = {name for name in files_below(self.home / "layers") if "index.db" not in name}
        assert files == {f"sha256/{digest.removeprefix('sha256:')}" for digest in self.present()}


Layers.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestLayers = Layers.TestCase
