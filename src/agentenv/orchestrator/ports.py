"""What the orchestrator needs from the rooms below it, as protocols.

The real implementations live in `vmm`, `network`, `storage`, `templates` and `guest`; tests bring fakes. Nothing here
has behaviour. Rules that hold for every port: a call that fails or is cancelled leaves nothing taken; a call that gives
something back may be repeated; failures are `AgentEnvError`s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from agentenv.guest.base import AgentInfo, AgentMetrics, GuestIdentity
from agentenv.network.base import EgressPolicy, Slot
from agentenv.orchestrator.model import CollectedSpace, SpaceReport
from agentenv.snapshots import accounting
from agentenv.snapshots.machines import Capture, CapturedMachine, LoadableMachine
from agentenv.snapshots.manifest import SnapshotManifest
from agentenv.storage.disks import DiskEvent
from agentenv.storage.layers import StoredLayer
from agentenv.templates.snapshots import Naming, Published
from agentenv.vmm.base import Disk, MachineRecord


class SlotPool(Protocol):
    """Prepared networks. Methods raise `NetworkError`; `acquire` raises `CapacityError` when the range is used up."""

    async def start(self, keep: Collection[int]) -> None:
        """Remove every slot of an earlier process whose index is not in `keep`; begin to warm new ones."""

    async def acquire(self) -> Slot:
        """Lend a slot that no packet of an earlier guest can reach."""

    async def adopt(self, index: int) -> Slot:
        """Take over a kept slot, together with the policy that it has."""

    async def apply_policy(self, slot: Slot, policy: EgressPolicy) -> None:
        """Replace the slot's rules atomically."""

    async def wait_ready(self, slot: Slot) -> None:
        """Return when the agent in the slot's guest said that it listens, also if it said so before this call."""

    def clear_ready(self, slot: Slot) -> None:
        """Forget that an agent listened: another guest boots in the slot."""

    async def release(self, slot: Slot) -> None:
        """Take a lent slot back. Idempotent."""

    async def close(self) -> None:
        """Remove the slots that are not lent. Lent ones stay, for the machines that use them."""


class DiskStore(Protocol):
    """Root disks. Methods raise `StorageError` or `InsufficientStorageError`."""

    async def create(self, disk_id: str, layers: Sequence[str], virtual_size: int, directory: Path) -> Disk:
        """Make a writable disk whose content is that of `layers`; its socket is in `directory`, and owned as that is.

        `virtual_size` is in bytes.
        """

    async def remove(self, disk_id: str) -> None:
        """Remove what `create` made. Idempotent."""

    async def reconcile(self, keep: Collection[str]) -> Sequence[str]:
        """Remove every disk that is not in `keep`, whose machines must have ended; serve those in it again.

        Returns what was done, in words for the log.
        """

    async def capture(self, disk_id: str, *, sealed: Callable[[], None] | None = None) -> StoredLayer:
        """Seal what was written since the last capture into a layer, while the disk goes on.

        `sealed` is called at the moment from which on writes are not part of the layer any more.
        """

    async def chain(self, disk_id: str) -> tuple[StoredLayer, ...]:
        """The layers of a disk below its upper, bottom first."""

    def on_event(self, callback: Callable[[DiskEvent], None]) -> None:
        """Have `callback` called, in the event loop, for what happens to disks in use."""


class SavedMachines(Protocol):
    """Snapshots of machines. Methods raise `SnapshotError` and its like, `StorageError`, `InsufficientStorageError`."""

    async def save(self, capture: Capture) -> SnapshotManifest:
        """Save a stopped machine and its disk. The snapshot exists, durably, when this returns; else nothing of it."""

    def capture(self, capture: Capture) -> AbstractAsyncContextManager[CapturedMachine]:
        """Hold a stopped machine, which may run on once this is entered; without a commit nothing is left of it."""

    async def get(self, snapshot_id: str) -> SnapshotManifest:
        """Find one.

        Raises:
            SnapshotNotFoundError: there is none.
            SnapshotError: it is damaged.
        """

    async def delete(self, snapshot_id: str) -> None:
        """Delete one. Idempotent."""

    async def hidden(self) -> Sequence[str]:
        """Ids of all snapshots that pauses made."""

    def load(self, snapshot_id: str, *, memory: bool) -> AbstractAsyncContextManager[LoadableMachine]:
        """Keep all that a machine is started from while the context lasts; without `memory` it boots."""


class SnapshotCatalog(Protocol):
    """Named snapshots and their names. Methods raise `SnapshotError` and its like, `StorageError`."""

    async def list(self) -> Sequence[Published]:
        """All that can be read, the oldest first."""

    async def find(self, reference: str) -> Published:
        """Find one.

        Raises:
            InvalidRequestError: the reference is malformed.
            TemplateNotFoundError: nothing is called so.
        """

    async def ids_called(self, reference: str) -> Sequence[str]:
        """Ids of all that a deletion by this reference is about, the oldest first.

        Raises:
            TemplateNotFoundError: nothing is called so.
        """

    async def tree(self, sandbox_id: str | None = None) -> Sequence[accounting.SnapshotNode]:
        """The roots of the family tree, of one sandbox or of all."""

    async def usage(self) -> accounting.UsageReport:
        """What each snapshot costs."""

    async def name(self, name: str | None, taken: Collection[str]) -> Naming:
        """Say what a new snapshot is to be called; no name in `taken` is given away.

        Raises:
            InvalidRequestError: the name is malformed, or belongs to something else.
        """

    async def delete(self, snapshot_id: str) -> None:
        """Delete one.

        Raises:
            SnapshotNotFoundError: there is none.
        """


class Space(Protocol):
    """What takes up the disk of this node. Methods raise `StorageError`."""

    async def report(self) -> SpaceReport: ...

    async def collect(self) -> CollectedSpace:
        """Remove what nobody uses."""


class GuestMemory(Protocol):
    """Brings the memory of a saved machine into a file. Methods raise `StorageError`, `InsufficientStorageError`."""

    async def write(self, saved: LoadableMachine, out: Path) -> None:
        """Make a file of it."""

    async def fill(self, saved: LoadableMachine, out: Path) -> None:
        """Put it into a file that is there, all hole, and mapped already. After a failure that is good for nothing."""


class Template(Protocol):
    """What sandboxes are created from."""

    @property
    def template_id(self) -> str: ...

    @property
    def names(self) -> Sequence[str]:
        """Aliases, the main one first."""

    @property
    def layers(self) -> Sequence[str]:
        """Digests of the layers of its disk, bottom first."""

    @property
    def vcpus(self) -> int: ...

    @property
    def memory_mib(self) -> int: ...

    @property
    def disk_mib(self) -> int: ...

    @property
    def default_user(self) -> str: ...

    @property
    def default_workdir(self) -> str | None: ...

    @property
    def env(self) -> Mapping[str, str]: ...

    @property
    def snapshot_id(self) -> str | None:
        """The snapshot that sandboxes of it go on from; None: they boot."""


class TemplateStore(Protocol):
    """The templates of this node."""

    async def resolve(self, reference: str) -> Template:
        """Find a template by id or `alias[:tag]`.

        Raises:
            TemplateNotFoundError: nothing has that name.
        """

    async def taken(self) -> Collection[str]:
        """Ids and names of the templates that are no snapshots."""


class GuestAssets(Protocol):
    """The files that every guest boots from."""

    @property
    def kernel(self) -> Path: ...

    @property
    def initramfs(self) -> Path: ...


class Agent(Protocol):
    """One life of one guest's agent. Methods raise `GuestAgentError`."""

    async def health(self) -> None:
        """Return when the agent answers."""

    async def init(self, identity: GuestIdentity) -> AgentInfo:
        """Give the guest its identity, fresh entropy and the time of day."""

    async def metrics(self) -> AgentMetrics: ...

    async def sync(self) -> None:
        """Bring all that the guest wrote to its disk."""


class AgentFactory(Protocol):
    """Makes clients of agents."""

    def __call__(self, host: str, access_token: str) -> Agent: ...


class OrphanReaper(Protocol):
    """Finds what earlier server processes started and nobody owns. Raises `VmmError`."""

    async def reap(self, live: Collection[MachineRecord]) -> Sequence[str]:
        """End every VMM process of this home, and remove every guest memory file, that no record in `live` names.

        Returns what was removed, in words for the log. The processes are gone when this returns.
        """


class HostProbe(Protocol):
    """What the host has left. Cheap enough for every create."""

    def available_memory_bytes(self) -> int:
        """Memory that new guests may touch: the least of the host's, our cgroup's and the memory directory's room."""

    def free_disk_bytes(self) -> int:
        """Free space of the file system that holds the home."""

    def boot_id(self) -> str:
        """A word that changes with every boot of the host: pids of another boot mean nothing."""


class Clock(Protocol):
    """Time, so that tests need not wait for it."""

    def now(self) -> datetime:
        """The wall clock, aware UTC."""

    def monotonic(self) -> float:
        """Seconds that only grow."""

    async def sleep(self, seconds: float) -> None: ...
