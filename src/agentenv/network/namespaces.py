"""Network namespaces as files below `/run/netns`: make, enter for one call, remove. And what is made in them.

This file knows nothing of slots, addresses or firewalls. Every function here blocks; call it from a worker thread.
A namespace is entered only by a thread that ends with the call, so no other code ever runs in the wrong one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pyroute2 import IPRoute, NetlinkError

from agentenv.errors import ConfigurationError, NetworkError

NETNS_DIR = Path("/run/netns")
NFT_TIMEOUT_S = 30.0

_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SHARED = 0x100000
_MNT_DETACH = 0x2

# <linux/if_tun.h>
_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_netns_dir_lock = threading.Lock()

T = TypeVar("T")


def _syscall(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def in_throwaway_thread(call: Callable[[], T]) -> T:
    """Run `call` in a thread of its own and wait for it. Whatever namespace it enters dies with the thread."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # handed to the waiting thread, which raises it
            failure.append(error)

    thread = threading.Thread(target=body, name="aenv-netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def run_in(path: Path, call: Callable[[], T]) -> T:
    """Run `call` inside the network namespace at `path`; sockets and processes that it makes belong to it.

    Raises:
        OSError: the namespace does not exist or cannot be entered; or whatever `call` raises.
    """

    def body() -> T:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _syscall("setns", _libc.setns(descriptor, _CLONE_NEWNET))
        finally:
            os.close(descriptor)
        return call()

    return in_throwaway_thread(body)


def enter_new_namespace() -> None:
    """Move the calling thread into a new, empty network namespace. Only for a thread that ends soon.

    Raises:
        OSError: the process may not do that.
    """
    _syscall("unshare(CLONE_NEWNET)", _libc.unshare(_CLONE_NEWNET))


def _prepare_netns_dir() -> None:
    """Make `/run/netns` a shared mount as iproute2 does: a namespace removed here must be gone in other mounts too."""
    with _netns_dir_lock:
        NETNS_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
        target = str(NETNS_DIR).encode()
        if _libc.mount(b"", target, b"none", _MS_SHARED | _MS_REC, None) == 0:
            return
        _syscall(f"bind mount {NETNS_DIR}", _libc.mount(target, target, b"none", _MS_BIND | _MS_REC, None))
        _syscall(f"share {NETNS_DIR}", _libc.mount(b"", target, b"none", _MS_SHARED | _MS_REC, None))


def create_and_enter(name: str) -> None:
    """Make the namespace `name` and move the calling thread into it (see `enter_new_namespace`).

    Raises:
        FileExistsError: a namespace of that name exists.
        OSError: the process may not do that.
    """
    _prepare_netns_dir()
    path = NETNS_DIR / name
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
    try:
        enter_new_namespace()
        source = f"/proc/self/task/{threading.get_native_id()}/ns/net".encode()
        _syscall(f"mount {path}", _libc.mount(source, str(path).encode(), b"none", _MS_BIND, None))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def remove(name: str) -> None:
    """Take the name of a namespace away; the kernel destroys it when nothing is left in it. Idempotent.

    Raises:
        OSError: it cannot be unmounted or unlinked.
    """
    path = NETNS_DIR / name
    # A namespace may be mounted more than once on its name after a failed start; EINVAL says that no mount is left.
    while _libc.umount2(str(path).encode(), _MNT_DETACH) == 0:
        pass
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOENT):
        raise OSError(code, f"umount {path}: {os.strerror(code)}")
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def netlink() -> Iterator[IPRoute]:
    """A netlink connection to the namespace that the calling thread is in, for use in that thread.

    Raises:
        OSError: no socket can be made.
    """
    # pyroute2 runs on an event loop of its own; by the process-wide policy it could be uvloop, which knows no netlink.
    loop = asyncio.SelectorEventLoop()
    try:
        with IPRoute(use_event_loop=loop) as connection:
            yield connection
    finally:
        loop.close()


def create_tap(name: str) -> None:
    """Make a persistent single-queue tap device with virtio-net headers in the calling thread's namespace.

    Raises:
        OSError: no `/dev/net/tun`, no permission, or the name is taken by another kind of device.
    """
    descriptor = open_tap(name, vnet_header=True)
    try:
        fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)
    finally:
        os.close(descriptor)


def open_tap(name: str, *, vnet_header: bool) -> int:
    """Open (or make) a tap device and return its file descriptor; frames are read from and written to it.

    Raises:
        OSError: as in `create_tap`, or another process holds it (EBUSY).
    """
    flags = _IFF_TAP | _IFF_NO_PI | (_IFF_VNET_HDR if vnet_header else 0)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_sysctl(key: str, value: str) -> None:
    """Set `net.<key>` (slashes instead of dots) in the calling thread's namespace.

    Raises:
        OSError: it does not exist or may not be written.
    """
    Path("/proc/sys/net", key).write_text(value)


def load_nft(ruleset: str) -> None:
    """Load a ruleset atomically with one `nft` process in the calling thread's namespace: all of it or nothing.

    Raises:
        ConfigurationError: there is no `nft`.
        NetworkError: the kernel or `nft` refused it; the message has the reason.
    """
    try:
        done = subprocess.run(
            ["nft", "-f", "-"], input=ruleset, capture_output=True, text=True, timeout=NFT_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise ConfigurationError("the program nft is missing; install the package nftables") from error
    except subprocess.TimeoutExpired as error:
        raise NetworkError(f"nft did not finish within {NFT_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())[:500]
        raise NetworkError(
            f"the firewall rules could not be loaded: {reason}; `aenv doctor` checks the kernel for them"
        )


@contextlib.contextmanager
def kernel_errors(what: str) -> Iterator[None]:
    """Turn errors of netlink, system calls and files into a `NetworkError` that begins with `what`."""
    try:
        yield
    except NetlinkError as error:
        raise NetworkError(f"{what}: netlink answered {error.code} ({os.strerror(error.code)})") from error
    except OSError as error:
        raise NetworkError(f"{what}: {error.strerror or error}") from error
