"""Checks the `network` object of a create call and turns it into the orchestrator's words (E2B contract §2.2.1).

Does not decide what the rules do: that is the network room's.
"""

from __future__ import annotations

import ipaddress
import re

from agentenv.api.models import NetworkBody
from agentenv.errors import InvalidRequestError, NotImplementedYetError
from agentenv.orchestrator.model import NetworkOptions

AGENT_PORT = 49983
_ALL_IPV4 = "0.0.0.0/0"
_MOST_DNS_SERVERS = 10
_DOMAIN = re.compile(
    r"(?=.{1,253}\Z)(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.IGNORECASE
)
_HOST_HEADER = re.compile(r"[A-Za-z0-9._:\[\]-]{1,253}")


def check_network(network: NetworkBody, *, allow_internet_access: bool | None) -> NetworkOptions:
    """Validate a network object.

    Args:
        network: the object as sent.
        allow_internet_access: the sandbox's flag; False counts as a denial of everything.

    Raises:
        InvalidRequestError: an entry has no valid form, or the rules contradict each other.
        NotImplementedYetError: the rules are valid, but this version cannot enforce them.
    """
    deny_out = tuple(entry.strip() for entry in network.deny_out or ())
    for entry in deny_out:
        if _is_ipv6(entry):
            raise InvalidRequestError(f"network.denyOut: IPv6 is always closed; leave '{entry}' out")
        if not _is_ipv4(entry):
            raise InvalidRequestError(
                f"network.denyOut: '{entry}' is not an IPv4 address or CIDR; domains are not denied"
            )
    denies_all = allow_internet_access is False or any(
        ipaddress.ip_network(e, strict=False).prefixlen == 0 for e in deny_out
    )
    allow_out = tuple(entry.strip() for entry in network.allow_out or ())
    domains = [entry for entry in allow_out if not _is_ipv4(entry)]
    for entry in domains:
        if not _is_domain(entry):
            raise InvalidRequestError(f"network.allowOut: '{entry}' is not an IPv4 address, CIDR, or domain")
    if domains and not denies_all:
        raise InvalidRequestError(f"network.allowOut: the domain '{domains[0]}' needs '{_ALL_IPV4}' in network.denyOut")
    https_ports = _check_https_ports(network.https_ports or [])
    mask = _check_mask(network.mask_request_host)
    _check_dns_servers(network.dns_servers or [])
    if domains:
        raise NotImplementedYetError(
            f"network.allowOut: rules for domains ('{domains[0]}') are not supported yet; use CIDRs"
        )
    for name, value in (
        ("dnsServers", network.dns_servers),
        ("egressProxy", network.egress_proxy),
        ("rules", network.rules),
    ):
        if value:
            raise NotImplementedYetError(f"network.{name} is not supported yet")
    return NetworkOptions(
        allow_public_traffic=network.allow_public_traffic,
        allow_out=allow_out,
        deny_out=deny_out,
        mask_request_host=mask,
        https_ports=https_ports,
    )


def _is_ipv4(entry: str) -> bool:
    try:
        ipaddress.IPv4Network(entry, strict=False)
    except ValueError:
        return False
    return True


def _is_ipv6(entry: str) -> bool:
    try:
        ipaddress.IPv6Network(entry, strict=False)
    except ValueError:
        return False
    return True


def _is_domain(entry: str) -> bool:
    # A last label of digits only is a mistyped address: no top-level domain is numeric.
    return bool(_DOMAIN.fullmatch(entry)) and not entry.rpartition(".")[2].isdigit()


def _check_https_ports(ports: list[int]) -> tuple[int, ...]:
    for port in ports:
        if not 1 <= port <= 65535:
            raise InvalidRequestError(f"network.httpsPorts: {port} is not a port")
        if port == AGENT_PORT:
            raise InvalidRequestError(f"network.httpsPorts: port {AGENT_PORT} belongs to the agent")
    return tuple(dict.fromkeys(ports))


def _check_mask(mask: str | None) -> str | None:
    if mask is not None and not _HOST_HEADER.fullmatch(mask.replace("${PORT}", "65535")):
        raise InvalidRequestError(
            "network.maskRequestHost must be a host name with an optional port; ${PORT} expands to it"
        )
    return mask


def _check_dns_servers(servers: list[str]) -> None:
    if len(servers) > _MOST_DNS_SERVERS:
        raise InvalidRequestError(f"network.dnsServers: at most {_MOST_DNS_SERVERS} servers")
    for server in servers:
        try:
            ipaddress.IPv4Address(server)
        except ValueError as error:
            raise InvalidRequestError(f"network.dnsServers: '{server}' is not an IPv4 address") from error
