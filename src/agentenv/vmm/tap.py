"""Opens a tap device that lies in another network namespace, as a descriptor for a VMM to inherit.

Making and configuring taps is the network room's job. Interface: tun(4), include/uapi/linux/if_tun.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading
from pathlib import Path

from agentenv.errors import VmmError

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_NAME_BYTES = 16


def open_tap(namespace: Path, name: str) -> int:
    """Attach to an existing tap in a namespace and return its descriptor (close-on-exec). Blocking.

    Raises:
        VmmError: no such namespace or tap, no permission, or another VMM holds the tap.
    """
    if not 0 < len(name.encode()) < _NAME_BYTES:
        raise VmmError(f"'{name}' is not the name of a network interface")
    result: list[int | OSError] = []

    def attach() -> None:
        try:
            result.append(_attach(namespace, name))
        except OSError as error:
            result.append(error)

    # A thread of its own, which ends here: one that changed its namespace must never go back to a pool.
    thread = threading.Thread(target=attach, name="open-tap")
    thread.start()
    thread.join()
    outcome = result[0]
    if isinstance(outcome, OSError):
        raise VmmError(f"cannot open the tap {name} in {namespace}: {outcome.strerror}") from outcome
    return outcome


def _attach(namespace: Path, name: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    namespace_fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(namespace_fd, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(namespace_fd)
    # TUNSETIFF makes a device of that name when there is none; a tap that the slot did not make must not appear.
    if not _interface_exists(name):
        raise OSError(errno.ENODEV, "no such interface")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    except OSError:
        os.close(tap)
        raise
    return tap


def _interface_exists(name: str) -> bool:
    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True
