"""Puts together what operations on sandboxes work with. Starts nothing, decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentenv.config import Settings
from agentenv.orchestrator.admission import Admission, StartGate
from agentenv.orchestrator.cleanup import Cleaner
from agentenv.orchestrator.guest_memory import SavedMemoryFiles
from agentenv.orchestrator.journal import Journal
from agentenv.orchestrator.launch import Launcher, Releaser, WarmPool
from agentenv.orchestrator.live import LiveSandbox, LiveSandboxes
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.ports import (
    AgentFactory,
    Clock,
    DiskStore,
    GuestAssets,
    GuestMemory,
    HostProbe,
    SavedMachines,
    SlotPool,
    SnapshotCatalog,
    TemplateStore,
)
from agentenv.orchestrator.presence import Presence
from agentenv.orchestrator.routes import RouteTable
from agentenv.orchestrator.tasks import OwnedTasks
from agentenv.vmm.base import Vmm


def assemble(
    settings: Settings,
    *,
    vmm: Vmm,
    slots: SlotPool,
    disks: DiskStore,
    templates: TemplateStore,
    assets: GuestAssets,
    agents: AgentFactory,
    host: HostProbe,
    saved: SavedMachines,
    catalog: SnapshotCatalog,
    clock: Clock,
    journal: Journal,
    memory: GuestMemory | None,
    warm: WarmPool | None,
    routes: RouteTable,
    pause: Callable[[LiveSandbox], object],
) -> OperationParts:
    """Make all parts of one node. The arguments are those of `Orchestrator`, and where traffic goes.

    Args:
        settings, vmm, slots, disks, templates, assets, agents, host, saved, catalog, clock, journal, memory, warm: see
            `Orchestrator`.
        routes: where traffic goes.
        pause: begins to pause a sandbox whose time is over.
    """
    limits = settings.sandbox
    live, operations = LiveSandboxes(), OwnedTasks()
    releaser = Releaser(journal=journal, slots=slots, disks=disks, saved=saved)
    cleaner = Cleaner(releaser, clock)
    launcher = Launcher(
        settings,
        journal=journal,
        vmm=vmm,
        slots=slots,
        disks=disks,
        assets=assets,
        agents=agents,
        host=host,
        clock=clock,
        memory=memory or SavedMemoryFiles(),
        warm=warm,
    )
    presence = Presence(
        journal=journal,
        releaser=releaser,
        cleaner=cleaner,
        agents=agents,
        clock=clock,
        live=live,
        routes=routes,
        operations=operations,
        pause=pause,
    )
    return OperationParts(
        settings=settings,
        journal=journal,
        templates=templates,
        catalog=catalog,
        vmm=vmm,
        launcher=launcher,
        releaser=releaser,
        cleaner=cleaner,
        saved=saved,
        agents=agents,
        live=live,
        admission=Admission(limits, host),
        gate=StartGate(limits.max_concurrent_starts, limits.max_queued_starts, clock),
        clock=clock,
        operations=operations,
        presence=presence,
        standing=asyncio.Semaphore(limits.max_concurrent_starts),
    )
