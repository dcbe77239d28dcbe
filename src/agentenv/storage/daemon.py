"""The block daemon's process: started detached, taken over after a restart of the server, started again when it dies.

What the daemon can be asked is in `blockd.py`; which devices it should have is the business of `disks.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from agentenv.storage.blockd import BlockClient


class BlockDaemonProcess:
    """The one daemon of a home.

    Args:
        binary: `aenv-blockd`, absolute.
        state: its state directory, made when it is missing (0700).
        socket: where it listens.
        log_file: what it writes to standard error, capped.

    Attributes:
        client: talks to it; calls wait while it is being started again.
    """

    client: BlockClient

    def __init__(self, binary: Path, *, state: Path, socket: Path, log_file: Path) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Take over the running daemon, or start one; return when it answers. From then on it is supervised.

        A daemon of another binary or protocol version is ended in order and replaced; clients of its devices see a
        pause.

        Raises:
            StorageError: it does not start; the message has its last words.
        """
        raise NotImplementedError

    def on_start(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Have `callback` called each time a daemon answers that was started after `start` returned."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop supervising. The daemon goes on, unless it has no device: then it is ended. Idempotent."""
        raise NotImplementedError
