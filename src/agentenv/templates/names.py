"""Which snapshot has which name now, kept up to date as snapshots come and go. Decides on manifests; no I/O.

The rules: a snapshot is a build of a template, and its names, `alias:tag`, are tags of the template; one that never had
a name has the tag `default`. Of several with the same name the latest has it; when that one alone goes, the one before
has it again, but whoever deletes by name deletes all that ever had it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from agentenv.snapshots.index import Age, age_of
from agentenv.snapshots.manifest import SnapshotManifest
from agentenv.templates.store import DEFAULT_TAG, TemplateReference

K = TypeVar("K")
_Key = tuple[str, str]
"""An alias or template id, and a tag."""


@dataclass(frozen=True, slots=True)
class Published:
    """A named snapshot (or one that could have a name), as callers may refer to it now."""

    manifest: SnapshotManifest
    reference: str
    """`alias:tag` while it is the latest of that name; `<template id>:default` when it never had one; `<template
    id>:<snapshot id>` when a later one took its name."""
    names: tuple[str, ...]
    """`alias:tag`, those that are still its own."""

    @property
    def snapshot_id(self) -> str:
        return self.manifest.snapshot_id

    @property
    def template_id(self) -> str:
        """Of the template that it is a build of."""
        return template_of(self.manifest)


def template_of(manifest: SnapshotManifest) -> str:
    """The template that a snapshot is a build of."""
    return manifest.own_template_id or manifest.snapshot_id


class SnapshotNames:
    """Watches an index of snapshots; hidden ones are left out. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published: dict[str, Published] = {}
        self._order: list[Age] = []
        self._sorted: tuple[Published, ...] | None = None
        self._holders: dict[_Key, list[Age]] = {}
        """Who was ever given a tag, the oldest first: the last one has it."""
        self._builds: dict[str, list[Age]] = {}
        """Of a template, by its id and its aliases."""
        self._templates: dict[str, int] = {}
        """Ids of templates, and how many builds each has."""

    def added(self, manifest: SnapshotManifest) -> None:
        """Take in a snapshot."""
        if manifest.hidden:
            return
        age = age_of(manifest)
        with self._lock:
            insort(self._order, age)
            keys = _keys(manifest)
            affected = {manifest.snapshot_id, *self._now_held_by(keys)}
            for key in keys:
                insort(self._holders.setdefault(key, []), age)
            for template in _templates(manifest):
                insort(self._builds.setdefault(template, []), age)
            own = template_of(manifest)
            self._templates[own] = self._templates.get(own, 0) + 1
            self._published[manifest.snapshot_id] = Published(manifest, "", ())
            self._name(affected)

    def removed(self, manifest: SnapshotManifest) -> None:
        """Forget a snapshot."""
        if manifest.hidden:
            return
        age = age_of(manifest)
        with self._lock:
            del self._order[bisect_left(self._order, age)]
            keys = _keys(manifest)
            for key in keys:
                _take_out(self._holders, key, age)
            for template in _templates(manifest):
                _take_out(self._builds, template, age)
            own = template_of(manifest)
            self._templates[own] -= 1
            if not self._templates[own]:
                del self._templates[own]
            del self._published[manifest.snapshot_id]
            self._name(self._now_held_by(keys))

    def list(self) -> tuple[Published, ...]:
        """All of them, the oldest first."""
        with self._lock:
            if self._sorted is None:
                self._sorted = tuple(self._published[name] for _, name in self._order)
            return self._sorted

    def find(self, wanted: TemplateReference) -> Published | None:
        """What a reference means now."""
        with self._lock:
            if wanted.tag is not None:
                # The tag may be an id: no tag has the form of one.
                exact = self._published.get(wanted.tag)
                if exact is not None and wanted.name in _templates(exact.manifest):
                    return exact
                return self._holder((wanted.name, wanted.tag))
            found = self._holder((wanted.name, DEFAULT_TAG)) or self._published.get(wanted.name)
            if found is None and wanted.name in self._templates:
                found = self._published[self._builds[wanted.name][-1][1]]
            return found

    def ever_called(self, wanted: TemplateReference) -> tuple[str, ...]:
        """Ids of all that a reference means or meant before, the oldest first: a template id alone means all builds."""
        with self._lock:
            exact = self._published.get(wanted.tag or wanted.name)
            if exact is not None and (wanted.tag is None or wanted.name in _templates(exact.manifest)):
                return (exact.snapshot_id,)
            if wanted.tag is None and wanted.name in self._templates:
                return tuple(name for _, name in self._builds[wanted.name])
            return tuple(name for _, name in self._holders.get((wanted.name, wanted.tag or DEFAULT_TAG), ()))

    def builds(self, template: str) -> tuple[Published, ...]:
        """All builds of a template, by its id or an alias, the oldest first."""
        with self._lock:
            return tuple(self._published[name] for _, name in self._builds.get(template, ()))

    def template_ids(self) -> tuple[str, ...]:
        """Of all templates, in order."""
        with self._lock:
            return tuple(sorted(self._templates))

    def is_template_id(self, text: str) -> bool:
        """Whether it is the id of a template that has builds."""
        with self._lock:
            return text in self._templates

    def _holder(self, key: _Key) -> Published | None:
        holders = self._holders.get(key)
        return self._published[holders[-1][1]] if holders else None

    def _now_held_by(self, keys: Iterable[_Key]) -> set[str]:
        return {holders[-1][1] for key in keys if (holders := self._holders.get(key))}

    def _name(self, snapshot_ids: Iterable[str]) -> None:
        """Say again what some are called."""
        self._sorted = None
        for snapshot_id in snapshot_ids:
            manifest = self._published[snapshot_id].manifest
            age = age_of(manifest)
            names = tuple(name for name in manifest.names if self._holders[_key(name)][-1] == age)
            template = template_of(manifest)
            if names:
                reference = names[0]
            elif not manifest.names and self._holders[template, DEFAULT_TAG][-1] == age:
                reference = f"{template}:{DEFAULT_TAG}"
            else:
                reference = f"{template}:{snapshot_id}"
            self._published[snapshot_id] = Published(manifest, reference, names)


def aliases_of(manifest: SnapshotManifest) -> tuple[str, ...]:
    """The aliases of the template that a snapshot is a build of, as far as it knows them."""
    return tuple(dict.fromkeys(_key(name)[0] for name in manifest.names))


def _key(name: str) -> _Key:
    alias, _, tag = name.partition(":")
    return alias, tag


def _keys(manifest: SnapshotManifest) -> frozenset[_Key]:
    template = template_of(manifest)
    if not manifest.names:
        return frozenset({(template, DEFAULT_TAG)})
    keys = [_key(name) for name in manifest.names]
    return frozenset([*keys, *((template, tag) for _, tag in keys)])


def _templates(manifest: SnapshotManifest) -> frozenset[str]:
    return frozenset([template_of(manifest), *aliases_of(manifest)])


def _take_out(ages: dict[K, list[Age]], key: K, age: Age) -> None:
    left = ages[key]
    del left[bisect_left(left, age)]
    if not left:
        del ages[key]
