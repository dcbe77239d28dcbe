"""Egress policy as nftables text, and client text as networks. Pure functions: nothing here touches the kernel.

The ruleset of a slot is loaded once, whole; later only its two policy chains (`policy_egress`, `policy_dns`) are
replaced, in one transaction. The rules judge every packet that the guest originates, not only the first of a
connection: a tighter policy also cuts connections that are already open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, NetmaskValueError, collapse_addresses

from agentenv.errors import InvalidRequestError
from agentenv.network.base import GATEWAY_ADDRESS, GUEST_ADDRESS, READY_PORT, TAP_NAME, EgressPolicy

SLOT_TABLE = "aenv"
HOST_TABLE = "aenv_host"
UPLINK_NAME = "uplink0"
"""The namespace's end of the veth pair."""
HOST_LINK_PREFIX = "aenv"
"""Names of the host's ends begin so; the rules of the host match on it."""

PRIVATE_RANGES = tuple(
    IPv4Network(text)
    for text in (
        "10.0.0.0/8",
        "100.64.0.0/10",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "198.18.0.0/15",
    )
)
"""Closed by default; an allow entry that lies inside one of them opens that destination."""

RESERVED_RANGES = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "192.0.0.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "100.100.100.200/32",
        "168.63.129.16/32",
    )
)
"""Loopback, link-local and cloud metadata (169.254.169.254, 192.0.0.192, 100.100.100.200, 168.63.129.16), multicast,
reserved and broadcast. No allow entry of a caller opens them; only the operator's `allow_private` does."""

EVERYTHING = IPv4Network("0.0.0.0/0")

# Refusing beats dropping: a program in the guest fails at once instead of waiting minutes for a time-out.
_REFUSE = """\
    meta l4proto tcp reject with tcp reset
    reject with icmp type admin-prohibited"""

_DOMAIN = re.compile(
    r"(?:\*|(?:\*\.)?(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9-]{0,62}[a-z]\.?)", re.IGNORECASE
)
_IPV4 = re.compile(r"[0-9.]+(?:/[0-9]{1,2})?")


@dataclass(frozen=True, slots=True)
class EgressEntries:
    """Entries of an allow or deny list, sorted by what they are. `domains` are lower case and may begin with `*.`."""

    networks: tuple[IPv4Network, ...] = ()
    domains: tuple[str, ...] = ()


def parse_entries(entries: Iterable[str], field: str = "allowOut") -> EgressEntries:
    """Sort the entries of a client's list into IPv4 networks and domain names.

    Host bits of a CIDR are dropped (`10.1.2.3/8` is `10.0.0.0/8`), as E2B does.

    Args:
        entries: addresses, CIDRs or domain names.
        field: name of the list, for messages.

    Raises:
        InvalidRequestError: an entry is none of these, or is IPv6 (which is always closed).
    """
    networks: list[IPv4Network] = []
    domains: list[str] = []
    for entry in entries:
        text = entry.strip()
        if _IPV4.fullmatch(text):
            try:
                networks.append(IPv4Network(text, strict=False))
            except (AddressValueError, NetmaskValueError) as error:
                raise InvalidRequestError(f"{field}: '{entry[:80]}' is not a valid IPv4 address or CIDR") from error
        elif _is_ipv6(text):
            raise InvalidRequestError(
                f"{field}: '{entry[:80]}' is IPv6, which sandboxes do not have; it is always closed"
            )
        elif len(text) <= 255 and _DOMAIN.fullmatch(text):
            domains.append(text.lower().rstrip("."))
        else:
            raise InvalidRequestError(f"{field}: '{entry[:80]}' is not an IPv4 address, CIDR or domain name")
    return EgressEntries(tuple(networks), tuple(domains))


def parse_networks(entries: Iterable[str], field: str = "denyOut") -> tuple[IPv4Network, ...]:
    """Like `parse_entries` where only addresses and CIDRs make sense.

    Raises:
        InvalidRequestError: an entry is no IPv4 address or CIDR.
    """
    parsed = parse_entries(entries, field)
    if parsed.domains:
        raise InvalidRequestError(
            f"{field}: '{parsed.domains[0][:80]}' is a domain name; only IPs and CIDRs are accepted"
        )
    return parsed.networks


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text.partition("/")[0])
    except AddressValueError:
        return False
    return True


def dns_allowed(policy: EgressPolicy) -> bool:
    """Whether the guest may ask the resolver at the gateway: not when all is denied, unless it is allowed by name."""
    if any(GATEWAY_ADDRESS in network for network in policy.allow if network != EVERYTHING):
        return True
    if EVERYTHING in collapse_addresses(policy.allow):
        return True
    return policy.internet and EVERYTHING not in collapse_addresses(policy.deny)


def render_policy(policy: EgressPolicy, operator_allow: Sequence[IPv4Network] = ()) -> str:
    """Commands that replace the policy chains of a slot's table, atomically when loaded together.

    Order: what the caller allows (inside the private ranges only what an entry names there), what the caller denies,
    what the operator opened, the closed ranges, then the rest by `policy.internet`.

    Args:
        policy: the sandbox's policy.
        operator_allow: `NetworkSettings.allow_private`: destinations every sandbox may reach unless it denies them.
    """
    named_private = [network for network in policy.allow if any(network.subnet_of(closed) for closed in PRIVATE_RANGES)]
    lines = [f"flush chain inet {SLOT_TABLE} policy_egress", f"flush chain inet {SLOT_TABLE} policy_dns"]

    def rule(networks: Iterable[IPv4Network], verdict: str) -> None:
        text = _elements(networks)
        if text:
            lines.append(f"add rule inet {SLOT_TABLE} policy_egress ip daddr {{ {text} }} {verdict}")

    operator = _overlap(operator_allow, [*PRIVATE_RANGES, *RESERVED_RANGES])
    rule(_without(RESERVED_RANGES, operator), "goto refuse_it")
    rule(named_private, "accept")
    # A wide allow entry (0.0.0.0/0) means the internet: it must not open the private ranges as a side effect.
    rule(_without(policy.allow, PRIVATE_RANGES), "accept")
    rule(_overlap(policy.allow, operator), "accept")
    rule(policy.deny, "goto refuse_it")
    if policy.internet:
        rule(operator, "accept")
        rule(PRIVATE_RANGES, "goto refuse_it")
        lines.append(f"add rule inet {SLOT_TABLE} policy_egress accept")
    else:
        lines.append(f"add rule inet {SLOT_TABLE} policy_egress goto refuse_it")
    if dns_allowed(policy):
        lines.append(f"add rule inet {SLOT_TABLE} policy_dns accept")
    return "\n".join(lines) + "\n"


def render_slot(
    slot_address: IPv4Address,
    host_address: IPv4Address,
    policy: EgressPolicy,
    operator_allow: Sequence[IPv4Network] = (),
) -> str:
    """The whole ruleset of a new slot's namespace, with its first policy: one load, closed from the first packet.

    Only connections from `host_address` are led to the guest: late packets of a former slot find nothing.
    """
    tap, uplink = TAP_NAME, UPLINK_NAME
    return f"""\
table inet {SLOT_TABLE} {{
  chain check_source {{
    type filter hook prerouting priority raw; policy accept;
    meta nfproto ipv6 drop
    iifname "{tap}" ip saddr != {GUEST_ADDRESS} drop
  }}
  chain to_guest {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname != "{uplink}" return
    ip saddr {host_address} ip daddr {slot_address} meta l4proto {{ tcp, udp }} dnat ip to {GUEST_ADDRESS}
  }}
  chain nat_source {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{tap}" snat ip to {GATEWAY_ADDRESS}
    oifname "{uplink}" snat ip to {slot_address}
  }}
  chain refuse_it {{
{_REFUSE}
  }}
  chain policy_dns {{
  }}
  chain policy_egress {{
  }}
  chain filter_forward {{
    type filter hook forward priority filter; policy drop;
    ct state invalid drop
    iifname "{tap}" oifname "{uplink}" jump from_guest
    iifname "{uplink}" oifname "{tap}" jump into_guest
  }}
  chain from_guest {{
    ct direction reply accept
    meta l4proto {{ tcp, udp, icmp }} jump policy_egress
    drop
  }}
  chain into_guest {{
    ct state established,related accept
    ct status dnat accept
    drop
  }}
  chain filter_input {{
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    iifname "{tap}" ip daddr {GATEWAY_ADDRESS} udp dport {READY_PORT} accept
    iifname "{tap}" ip daddr {GATEWAY_ADDRESS} meta l4proto {{ tcp, udp }} th dport 53 jump policy_dns
    iifname "{tap}" goto refuse_it
  }}
  chain filter_output {{
    type filter hook output priority filter; policy accept;
    meta nfproto ipv6 drop
  }}
}}
{render_policy(policy, operator_allow)}"""


def render_host(callbacks: Sequence[IPv4Network] = ()) -> str:
    """The ruleset of the host, replaced as a whole. It matches the slots' links by name, so all servers share it.

    Slots may go out by other links, never to each other, and reach no service of the host itself except at `callbacks`
    (single addresses that an operator opened). A source address that is not the slot's own is dropped.
    """
    slots = f'"{HOST_LINK_PREFIX}*"'
    opened = _elements(callbacks)
    callback_rule = f"iifname {slots} ip daddr {{ {opened} }} accept" if opened else ""
    return f"""\
table inet {HOST_TABLE}
delete table inet {HOST_TABLE}
table inet {HOST_TABLE} {{
  chain check_source {{
    type filter hook prerouting priority raw; policy accept;
    iifname {slots} meta nfproto ipv6 drop
    iifname {slots} fib saddr . iif oif missing drop
  }}
  chain refuse_it {{
{_REFUSE}
  }}
  chain filter_input {{
    type filter hook input priority filter - 5; policy accept;
    iifname {slots} ct state established,related accept
    {callback_rule}
    iifname {slots} goto refuse_it
  }}
  chain filter_forward {{
    type filter hook forward priority filter - 5; policy accept;
    iifname {slots} oifname {slots} goto refuse_it
    iifname {slots} tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    iifname {slots} accept
    oifname {slots} ct state != {{ established, related }} drop
  }}
  chain nat_leave {{
    type nat hook postrouting priority srcnat; policy accept;
    iifname {slots} oifname != {slots} masquerade
  }}
}}
"""


def render_host_removal() -> str:
    """Commands that remove the host's ruleset whether or not it is there."""
    return f"table inet {HOST_TABLE}\ndelete table inet {HOST_TABLE}\n"


def _elements(networks: Iterable[IPv4Network]) -> str:
    return ", ".join(str(network) for network in collapse_addresses(networks))


def _overlap(networks: Iterable[IPv4Network], ranges: Sequence[IPv4Network]) -> list[IPv4Network]:
    """The parts of `networks` that lie inside `ranges`."""
    found: list[IPv4Network] = []
    for network in networks:
        for closed in ranges:
            if network.subnet_of(closed):
                found.append(network)
            elif closed.subnet_of(network):
                found.append(closed)
    return list(collapse_addresses(found))


def _without(networks: Iterable[IPv4Network], ranges: Sequence[IPv4Network]) -> list[IPv4Network]:
    """`networks` minus `ranges`."""
    rest = list(collapse_addresses(networks))
    for closed in ranges:
        remaining: list[IPv4Network] = []
        for network in rest:
            if network.subnet_of(closed):
                continue
            if closed.subnet_of(network):
                remaining.extend(network.address_exclude(closed))
            else:
                remaining.append(network)
        rest = remaining
    return list(collapse_addresses(rest))
