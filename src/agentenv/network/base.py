"""Data of the network room: what a slot is and what a sandbox may reach. No kernel call happens here."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

GUEST_ADDRESS = IPv4Address("169.254.0.21")
GATEWAY_ADDRESS = IPv4Address("169.254.0.22")
GUEST_PREFIX = 30
GUEST_MAC = "02:fc:00:00:00:05"
TAP_NAME = "tap0"
READY_PORT = 49980
"""UDP port on the gateway address: the guest agent sends one datagram here when it listens."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One prepared network. All slots look the same from inside; `address` is how the host reaches the guest."""

    index: int
    namespace: str
    """Name below `/run/netns`."""
    address: IPv4Address
    """TCP connections from the host to this address arrive in the guest, on the same port."""
    host_address: IPv4Address
    """The host's end of the veth pair."""
    veth: str
    """Name of the host's end of the veth pair."""

    @property
    def namespace_path(self) -> Path:
        return Path("/run/netns") / self.namespace


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """What the guest may reach. `allow` beats `deny`, both beat the default.

    Default: every IPv4 destination except private ranges, link-local and cloud metadata. `internet=False` denies
    everything that `allow` does not name, DNS included. IPv6 is always closed. An entry of `allow` opens private
    destinations only where it lies inside a private range (`0.0.0.0/0` means the internet), and never opens loopback,
    link-local and cloud metadata: that is left to the operator's `allow_private`.
    """

    internet: bool = True
    allow: tuple[IPv4Network, ...] = ()
    deny: tuple[IPv4Network, ...] = ()
