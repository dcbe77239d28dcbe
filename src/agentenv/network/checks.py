"""What a host must offer for network slots, tried for real in a namespace that is thrown away. For `aenv doctor`.

Nothing of the host is changed; every finding names the command that mends it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, NamedTuple

from pyroute2 import NetlinkError

from agentenv.config import NetworkSettings
from agentenv.errors import AgentEnvError
from agentenv.network import namespaces
from agentenv.network.base import TAP_NAME, EgressPolicy
from agentenv.network.policy import HOST_LINK_PREFIX, HOST_TABLE, SLOT_TABLE, UPLINK_NAME, render_host, render_slot
from agentenv.network.resolvers import HostResolvers

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21}
_TIMEOUT_S = 10


class HostCheck(NamedTuple):
    """One requirement: whether it is met, what was found, and the command that mends it (empty when all is well)."""

    name: str
    ok: bool
    detail: str
    mend: str = ""


def check_host(settings: NetworkSettings) -> list[HostCheck]:
    """Try everything that slots need. Blocks for some 100 ms; never raises."""
    privileges = _check_privileges()
    checks = [privileges]
    if privileges.ok:
        checks += [
            _attempt("network namespaces", _try_namespace, "use a kernel with CONFIG_NET_NS"),
            _attempt("tap devices", _try_tap, "modprobe tun; in a container: docker run --device /dev/net/tun …"),
            _attempt("veth links", _try_veth, "modprobe veth"),
        ]
    nft = _check_nft()
    checks.append(nft)
    if nft.ok and privileges.ok:
        mend = "modprobe -a nf_tables nft_chain_nat nft_masq nft_ct nft_fib_inet nft_reject_inet"
        checks.append(_attempt("firewall rules with NAT", _try_rules, mend))
        checks.append(_check_forward_policy())
        checks.append(_check_addresses(settings.slot_cidr))
    checks += [_check_forwarding(), _check_resolvers(settings)]
    return checks


def _check_privileges() -> HostCheck:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    effective = int(found.group(1), 16) if found else 0
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        return HostCheck("network privileges", False, f"missing {', '.join(missing)}", "run the server as root (sudo)")
    return HostCheck("network privileges", True, "CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN are there")


def _attempt(name: str, attempt: Callable[[], str], mend: str) -> HostCheck:
    def inside() -> str:
        namespaces.enter_new_namespace()
        return attempt()

    try:
        return HostCheck(name, True, namespaces.in_throwaway_thread(inside))
    except NetlinkError as error:
        return HostCheck(name, False, os.strerror(error.code), mend)
    except (OSError, AgentEnvError) as error:
        return HostCheck(name, False, str(error), mend)


def _try_namespace() -> str:
    return "can be made"


def _try_tap() -> str:
    namespaces.create_tap(TAP_NAME)
    return "can be made"


def _try_veth() -> str:
    with namespaces.netlink() as inner:
        inner.link("add", ifname=UPLINK_NAME, kind="veth", peer={"ifname": f"{HOST_LINK_PREFIX}0"})
    return "can be made"


def _try_rules() -> str:
    namespaces.load_nft(render_slot(IPv4Address("10.200.0.2"), IPv4Address("10.200.0.1"), EgressPolicy()))
    namespaces.load_nft(render_host([IPv4Network("192.0.2.1/32")]))
    return "the rules of a slot and of the host load"


def _check_nft() -> HostCheck:
    path = shutil.which("nft")
    if path is None:
        return HostCheck("nft", False, "the program is missing", "apt-get install nftables")
    return HostCheck("nft", True, path)


def _check_forwarding() -> HostCheck:
    name = "IPv4 forwarding"
    try:
        state = Path("/proc/sys/net/ipv4/ip_forward").read_text().strip()
    except OSError as error:
        return HostCheck(name, False, f"cannot be read: {error.strerror}", "mount -t proc proc /proc")
    if state == "1":
        return HostCheck(name, True, "on")
    if os.access("/proc/sys/net/ipv4/ip_forward", os.W_OK):
        return HostCheck(name, True, "off; the server turns it on while it holds slots")
    return HostCheck(name, False, "off, and not writable here", "sysctl -w net.ipv4.ip_forward=1 (on the host)")


def _check_forward_policy() -> HostCheck:
    # Our tables cannot overrule another firewall's verdict: Docker, ufw and firewalld drop forwarded packets.
    name = "other firewalls"
    droppers: list[str] = []
    docker = False
    for chain in _nft_chains():
        if chain.get("table") in (HOST_TABLE, SLOT_TABLE):
            continue
        docker = docker or chain.get("name") == "DOCKER-USER"
        if chain.get("hook") == "forward" and chain.get("policy") == "drop":
            droppers.append(f"nft table {chain.get('family')} {chain.get('table')}")
    if _legacy_forward_drops():
        droppers.append("iptables-legacy")
    if not droppers:
        return HostCheck(name, True, "none drops forwarded packets")
    chain_name = "DOCKER-USER" if docker else "FORWARD"
    iptables = "iptables-legacy" if droppers == ["iptables-legacy"] else "iptables"
    mend = (
        f"{iptables} -I {chain_name} -i {HOST_LINK_PREFIX}+ -j ACCEPT && {iptables} -I {chain_name} "
        f"-o {HOST_LINK_PREFIX}+ -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
    )
    detail = (
        f"forwarded packets are dropped by default in {', '.join(droppers)}: guests have no internet unless allowed"
    )
    return HostCheck(name, _allowed_by_rule(chain_name), detail, mend)


def _nft_chains() -> list[dict[str, Any]]:
    output = _run(["nft", "-j", "list", "chains"])
    try:
        return [item["chain"] for item in json.loads(output)["nftables"] if "chain" in item]
    except (ValueError, KeyError, TypeError):
        return []


def _legacy_forward_drops() -> bool:
    names = Path("/proc/net/ip_tables_names")
    # The program would load the legacy modules by itself; ask it only when they are in use.
    if not names.exists() or "filter" not in names.read_text().split() or shutil.which("iptables-legacy") is None:
        return False
    return "-P FORWARD DROP" in _run(["iptables-legacy", "-S", "FORWARD"])


def _allowed_by_rule(chain: str) -> bool:
    wanted = f"-i {HOST_LINK_PREFIX}+ -j ACCEPT"
    programs = [name for name in ("iptables", "iptables-legacy") if shutil.which(name)]
    return any(wanted in _run([program, "-S", chain]) for program in programs)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _check_addresses(slot_cidr: IPv4Network) -> HostCheck:
    name = "slot addresses"

    def routes() -> list[tuple[IPv4Network, str]]:
        found = []
        with namespaces.netlink() as host:
            links = {link["index"]: link.get_attr("IFLA_IFNAME") for link in host.get_links()}
            for route in host.get_routes(family=2):
                target = route.get_attr("RTA_DST")
                if target is not None:
                    network = IPv4Network(f"{target}/{route['dst_len']}", strict=False)
                    found.append((network, links.get(route.get_attr("RTA_OIF"), "?")))
        return found

    try:
        others = [
            f"{network} on {link}"
            for network, link in namespaces.in_throwaway_thread(routes)
            if network.overlaps(slot_cidr) and not link.startswith(HOST_LINK_PREFIX)
        ]
    except (OSError, NetlinkError) as error:
        return HostCheck(name, False, f"routes cannot be read: {error}", "run the server as root (sudo)")
    if others:
        mend = "set network.slot_cidr (AENV_NETWORK__SLOT_CIDR) to a private range that this host does not use"
        return HostCheck(name, False, f"{slot_cidr} is in use: {', '.join(others[:3])}", mend)
    return HostCheck(name, True, f"{slot_cidr} is free")


def _check_resolvers(settings: NetworkSettings) -> HostCheck:
    try:
        servers = HostResolvers(settings.dns_servers).servers()
    except AgentEnvError as error:
        return HostCheck("resolvers", False, error.message, "set network.dns_servers to IP addresses")
    return HostCheck("resolvers", True, "guests' questions go to " + ", ".join(host for host, _ in servers))
