"""One network slot in the kernel: namespace, veth pair, tap, addresses, routes, firewall. Blocking; call from threads.

A slot's index decides its names and addresses; the caller owns the index by a claim (`claims.py`) before it calls here
and gives it back after `destroy`. Nothing here is asynchronous and nothing remembers state between calls.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from pyroute2 import IPRoute, NetlinkError

from agentenv.config import NetworkSettings
from agentenv.errors import NetworkError
from agentenv.network import namespaces
from agentenv.network.base import (
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_MAC,
    GUEST_PREFIX,
    READY_PORT,
    TAP_NAME,
    EgressPolicy,
    Slot,
)
from agentenv.network.namespaces import kernel_errors
from agentenv.network.policy import HOST_LINK_PREFIX, UPLINK_NAME, render_policy, render_slot

TAP_MAC = "02:fc:00:00:00:06"
"""The gateway's MAC: the same everywhere, because a resumed guest still has it in its neighbour table."""

DNS_PORT = 53
_NUD_PERMANENT = 0x80
_LOOPBACK_INDEX = 1


class SlotTakenError(NetworkError):
    """Kernel objects of this index exist though nobody claims it; take another index."""


@dataclass(frozen=True, slots=True)
class SlotSockets:
    """Sockets that live in a slot's namespace, bound to the gateway address. The holder closes them."""

    dns_udp: socket.socket
    dns_tcp: socket.socket
    ready: socket.socket

    def close(self) -> None:
        """Close all. Idempotent."""
        for one in (self.dns_udp, self.dns_tcp, self.ready):
            one.close()


def capacity(settings: NetworkSettings) -> int:
    """How many slots `slot_cidr` has addresses for."""
    return int(settings.slot_cidr.num_addresses // 4)


def slot_at(index: int, slot_cidr: IPv4Network) -> Slot:
    """The slot of an index: names and addresses, whether or not it exists.

    Raises:
        NetworkError: `slot_cidr` has no such slot.
    """
    if not 0 <= index < slot_cidr.num_addresses // 4:
        raise NetworkError(f"network.slot_cidr {slot_cidr} has no slot {index}")
    base = int(slot_cidr.network_address) + 4 * index
    return Slot(
        index=index,
        namespace=_namespace_name(index),
        address=IPv4Address(base + 2),
        host_address=IPv4Address(base + 1),
        veth=_link_name(index),
    )


def _namespace_name(index: int) -> str:
    return f"aenv-{index}"


def _link_name(index: int) -> str:
    return f"{HOST_LINK_PREFIX}{index}"


def create(slot: Slot, settings: NetworkSettings, policy: EgressPolicy) -> SlotSockets:
    """Make everything of a slot. On failure nothing of it is left.

    Raises:
        SlotTakenError: something of that name exists already and is not ours to remove.
        NetworkError: the kernel refused something.
        ConfigurationError: there is no `nft`.
    """
    with kernel_errors(f"cannot make network slot {slot.index}"):
        return namespaces.in_throwaway_thread(lambda: _create(slot, settings, policy))


def _create(slot: Slot, settings: NetworkSettings, policy: EgressPolicy) -> SlotSockets:
    try:
        host_namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NetworkError(f"cannot open the host's network namespace: {error.strerror}") from error
    try:
        with namespaces.netlink() as host:
            try:
                namespaces.create_and_enter(slot.namespace)
            except FileExistsError as error:
                raise SlotTakenError(f"the namespace {slot.namespace} exists already") from error
            try:
                return _fill(slot, settings, policy, host, host_namespace)
            except BaseException:
                # Without its name the namespace dies with this thread, and the links in it with the namespace.
                namespaces.remove(slot.namespace)
                raise
    finally:
        os.close(host_namespace)


def _fill(
    slot: Slot, settings: NetworkSettings, policy: EgressPolicy, host: IPRoute, host_namespace: int
) -> SlotSockets:
    mtu = settings.uplink_mtu
    _close_ipv6()
    # The rules come before the links, so there is no moment at which a packet could pass without them.
    namespaces.load_nft(render_slot(slot.address, slot.host_address, policy, settings.allow_private))
    namespaces.create_tap(TAP_NAME)
    with namespaces.netlink() as inner:
        try:
            inner.link(
                "add",
                ifname=UPLINK_NAME,
                kind="veth",
                mtu=mtu,
                peer={"ifname": slot.veth, "net_ns_fd": host_namespace, "mtu": mtu},
            )
        except NetlinkError as error:
            if error.code == errno.EEXIST:
                raise SlotTakenError(f"the link {slot.veth} exists already") from error
            raise
        try:
            _configure_links(slot, mtu, inner, host)
            # Refusals go to this guest only: without the limit none of its programs is left to wait for a time-out.
            namespaces.write_sysctl("ipv4/icmp_ratemask", "0")
            namespaces.write_sysctl("ipv4/ip_forward", "1")
            return _open_sockets()
        except BaseException:
            _delete_link(host, slot.veth)
            raise


def _configure_links(slot: Slot, mtu: int, inner: IPRoute, host: IPRoute) -> None:
    outer = host.link("get", ifname=slot.veth)[0]["index"]
    uplink, tap = socket.if_nametoindex(UPLINK_NAME), socket.if_nametoindex(TAP_NAME)
    inner.link("set", index=_LOOPBACK_INDEX, state="up")
    inner.link("set", index=tap, address=TAP_MAC, mtu=mtu, state="up")
    inner.addr("add", index=tap, address=str(GATEWAY_ADDRESS), prefixlen=GUEST_PREFIX)
    # A fixed neighbour saves the guest's first packet a round of ARP, which is retried only once a second.
    inner.neigh("add", dst=str(GUEST_ADDRESS), lladdr=GUEST_MAC, ifindex=tap, state=_NUD_PERMANENT)
    inner.link("set", index=uplink, state="up")
    inner.addr("add", index=uplink, address=str(slot.address), prefixlen=30)
    host.addr("add", index=outer, address=str(slot.host_address), prefixlen=30)
    host.link("set", index=outer, state="up")
    inner.route("add", dst="default", gateway=str(slot.host_address), oif=uplink)


def _close_ipv6() -> None:
    for scope in ("all", "default"):
        # A host without IPv6 has no such file, and nothing to close.
        with contextlib.suppress(FileNotFoundError):
            namespaces.write_sysctl(f"ipv6/conf/{scope}/disable_ipv6", "1")


def _open_sockets() -> SlotSockets:
    with contextlib.ExitStack() as undo:

        def bound(kind: socket.SocketKind, port: int) -> socket.socket:
            one = undo.enter_context(socket.socket(socket.AF_INET, kind))
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1 if kind == socket.SOCK_STREAM else 0)
            one.bind((str(GATEWAY_ADDRESS), port))
            return one

        sockets = SlotSockets(
            dns_udp=bound(socket.SOCK_DGRAM, DNS_PORT),
            dns_tcp=bound(socket.SOCK_STREAM, DNS_PORT),
            ready=bound(socket.SOCK_DGRAM, READY_PORT),
        )
        sockets.dns_tcp.listen(64)
        undo.pop_all()
        return sockets


def reopen(slot: Slot) -> SlotSockets:
    """Make the sockets of a slot that a former process of this server made.

    Raises:
        NetworkError: the namespace does not exist, or another process still holds its sockets.
    """
    with kernel_errors(f"cannot adopt network slot {slot.index}"):
        return namespaces.run_in(slot.namespace_path, _open_sockets)


def load_policy(slot: Slot, policy: EgressPolicy, operator_allow: Sequence[IPv4Network]) -> None:
    """Replace the slot's egress policy in one transaction.

    Raises:
        NetworkError: the namespace does not exist, or the kernel refused the rules (the former policy stays in force).
    """
    text = render_policy(policy, operator_allow)
    with kernel_errors(f"cannot set the egress policy of network slot {slot.index}"):
        namespaces.run_in(slot.namespace_path, lambda: namespaces.load_nft(text))


def destroy(index: int) -> None:
    """Remove everything of the slot `index` that is still there. Idempotent. Whoever holds its sockets closes them.

    Raises:
        NetworkError: the kernel refused something.
    """
    with kernel_errors(f"cannot remove network slot {index}"):
        with namespaces.netlink() as host:
            # First, and by name: a process that is still in the namespace is cut off at once.
            _delete_link(host, _link_name(index))
        namespaces.remove(_namespace_name(index))


def _delete_link(host: IPRoute, name: str) -> None:
    try:
        host.link("del", ifname=name)
    except NetlinkError as error:
        if error.code != errno.ENODEV:
            raise
