"""How the memory of a saved machine comes into the file that its VMM maps: unpacked from layers, or copied.

Knows of no sandbox and no VMM; the work itself is that of `storage.memory`.
"""

from __future__ import annotations

from pathlib import Path

from agentenv.snapshots.machines import LoadableMachine
from agentenv.storage.memory import copy_memory, fill_memory, fill_memory_from_image, unpack_memory


class SavedMemoryFiles:
    """The real `ports.GuestMemory`."""

    async def write(self, saved: LoadableMachine, out: Path) -> None:
        """See `ports.GuestMemory`."""
        if saved.memory_image is not None:
            await copy_memory(saved.memory_image, out)
        else:
            await unpack_memory(saved.memory_layers, out)

    async def fill(self, saved: LoadableMachine, out: Path) -> None:
        """See `ports.GuestMemory`."""
        if saved.memory_image is not None:
            await fill_memory_from_image(saved.memory_image, out)
        else:
            await fill_memory(saved.memory_layers, out)
