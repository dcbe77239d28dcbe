"""What all servers of a machine share: forwarding and the host's firewall table. First makes, last removes.

This file knows slots only by the prefix of their links and by the claims; it never makes or removes one.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from agentenv.config import NetworkSettings
from agentenv.network.claims import Claims
from agentenv.network.namespaces import kernel_errors, load_nft, write_sysctl
from agentenv.network.policy import render_host, render_host_removal

_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")

log = structlog.get_logger(__name__)


def set_up(settings: NetworkSettings, claims: Claims) -> None:
    """Register this server, turn IPv4 forwarding on (remembering that it was off) and load the host's rules. Blocks.

    Raises:
        NetworkError: the kernel refused something, or `/run` is not writable.
        ConfigurationError: there is no `nft`.
    """
    single_addresses = tuple(network for network in settings.allow_private if network.prefixlen == 32)
    with claims.host_lock(), kernel_errors("cannot prepare the host's network"):
        claims.register(single_addresses)
        claims.servers()
        load_nft(render_host(claims.opened_by_all()))
        if _FORWARD.read_text().strip() == "0":
            (claims.run_dir / "ip_forward").write_text("0\n")
            write_sysctl("ipv4/ip_forward", "1")
            log.info("ip_forward_enabled")


def tear_down(claims: Claims) -> None:
    """Leave the machine: when this server holds no slot, drop its registration; the last one restores the host. Blocks.

    Raises:
        NetworkError: the kernel refused something.
    """
    with claims.host_lock(), kernel_errors("cannot restore the host's network"):
        if claims.owned():
            return
        claims.unregister()
        if claims.servers() or claims.any_left():
            load_nft(render_host(claims.opened_by_all()))
            return
        load_nft(render_host_removal())
        before = claims.run_dir / "ip_forward"
        if before.exists():
            write_sysctl("ipv4/ip_forward", before.read_text().strip())
            before.unlink()
            log.info("ip_forward_restored")
