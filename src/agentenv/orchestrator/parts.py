"""What the operations on sandboxes work with, in one piece. Made by `Orchestrator`; no behaviour of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from agentenv.config import Settings
from agentenv.orchestrator.admission import Admission, StartGate
from agentenv.orchestrator.cleanup import Cleaner
from agentenv.orchestrator.journal import Journal
from agentenv.orchestrator.launch import Launcher, Releaser
from agentenv.orchestrator.live import LiveSandboxes
from agentenv.orchestrator.ports import AgentFactory, Clock, SavedMachines, SnapshotCatalog, TemplateStore
from agentenv.orchestrator.presence import Presence
from agentenv.orchestrator.tasks import OwnedTasks
from agentenv.vmm.base import Vmm


@dataclass(frozen=True, slots=True)
class OperationParts:
    """What `Creator`, `Pauser`, `Capturer`, `Forker` and `RollBack` share."""

    settings: Settings
    journal: Journal
    templates: TemplateStore
    catalog: SnapshotCatalog
    vmm: Vmm
    launcher: Launcher
    releaser: Releaser
    cleaner: Cleaner
    saved: SavedMachines
    agents: AgentFactory
    live: LiveSandboxes
    admission: Admission
    gate: StartGate
    clock: Clock
    operations: OwnedTasks
    """Work that comes to its end once begun, whoever leaves."""
    presence: Presence
    standing: asyncio.Semaphore
    """Places for guests that stand still while they are saved."""
    deleting: set[str] = field(default_factory=set)
    """Named snapshots that are being deleted: nothing may begin to go on from them."""
