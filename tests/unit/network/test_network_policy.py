"""Egress policy as text, judged by reading the rendered rules back and deciding as nftables would."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import InvalidRequestError
from agentenv.network.base import EgressPolicy
from agentenv.network.policy import (
    PRIVATE_RANGES,
    RESERVED_RANGES,
    dns_allowed,
    parse_entries,
    parse_networks,
    render_host,
    render_policy,
    render_slot,
)

EVERYTHING = IPv4Network("0.0.0.0/0")


def net(*texts: str) -> tuple[IPv4Network, ...]:
    return tuple(IPv4Network(text) for text in texts)


def passes(ruleset: str, address: str | IPv4Address) -> bool:
    """Decide a destination by the rules of the egress chain: the first match wins."""
    for line in ruleset.splitlines():
        found = re.fullmatch(
            r"add rule inet aenv policy_egress (?:ip daddr \{ ([^}]*) \} )?(accept|goto refuse_it)", line
        )
        if not found:
            continue
        networks = [IPv4Network(text) for text in found.group(1).split(", ")] if found.group(1) else [EVERYTHING]
        if any(IPv4Address(address) in network for network in networks):
            return found.group(2) == "accept"
    return False


@pytest.mark.parametrize(
    "closed",
    [
        "10.0.0.1",
        "10.255.255.255",
        "172.16.0.1",
        "172.31.255.254",
        "192.168.1.1",
        "100.64.0.1",
        "100.100.100.200",
        "169.254.169.254",
        "169.254.0.22",
        "127.0.0.1",
        "192.0.0.192",
        "198.18.0.1",
        "198.19.255.255",
        "224.0.0.251",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "0.0.0.0",
        "168.63.129.16",
    ],
)
def test_default_closes(closed: str) -> None:
    assert not passes(render_policy(EgressPolicy()), closed)


@pytest.mark.parametrize("opened", ["1.1.1.1", "9.255.255.255", "11.0.0.1", "172.32.0.1", "192.0.1.1", "223.255.255.1"])
def test_default_opens_the_internet(opened: str) -> None:
    assert passes(render_policy(EgressPolicy()), opened)


def test_no_internet_closes_all_but_what_is_allowed() -> None:
    rules = render_policy(EgressPolicy(internet=False, allow=net("1.2.3.0/24", "10.1.0.0/16")), net("192.168.7.7/32"))
    assert passes(rules, "1.2.3.4")
    assert passes(rules, "10.1.2.3")
    assert not passes(rules, "1.2.4.4")
    assert not passes(rules, "10.2.0.0")
    assert not passes(rules, "192.168.7.7")


def test_operator_opens_and_caller_may_still_deny() -> None:
    operator = net("192.168.7.0/24", "169.254.169.254/32")
    assert passes(render_policy(EgressPolicy(), operator), "192.168.7.9")
    assert passes(render_policy(EgressPolicy(), operator), "169.254.169.254")
    assert not passes(render_policy(EgressPolicy(), operator), "169.254.169.253")
    assert not passes(render_policy(EgressPolicy(deny=net("192.168.7.9/32")), operator), "192.168.7.9")


addresses = st.integers(0, 2**32 - 1).map(IPv4Address)
networks = st.builds(lambda address, bits: IPv4Network((address, bits), strict=False), addresses, st.integers(0, 32))
some = st.lists(networks, max_size=4).map(tuple)


@given(st.booleans(), some, some, some, addresses, st.data())
def test_rules_decide_as_the_words_say(
    internet: bool,
    allow: tuple[IPv4Network, ...],
    deny: tuple[IPv4Network, ...],
    operator: tuple[IPv4Network, ...],
    address: IPv4Address,
    data: st.DataObject,
) -> None:
    candidates = [*allow, *deny, *operator, *PRIVATE_RANGES, *RESERVED_RANGES]
    chosen = data.draw(st.sampled_from(candidates))
    if data.draw(st.booleans()):
        # An edge of one of the ranges, or its neighbour, is where a wrong rule shows.
        edge = data.draw(st.sampled_from([int(chosen[0]) - 1, int(chosen[0]), int(chosen[-1]), int(chosen[-1]) + 1]))
        address = IPv4Address(min(max(edge, 0), 2**32 - 1))

    def within(ranges: tuple[IPv4Network, ...]) -> bool:
        return any(address in network for network in ranges)

    private, reserved, opened = within(PRIVATE_RANGES), within(RESERVED_RANGES), within(operator)
    named = any(address in entry and any(entry.subnet_of(p) for p in PRIVATE_RANGES) for entry in allow)
    if reserved and not opened:
        expected = False
    elif within(allow) and (not private or named or opened):
        expected = True
    elif within(deny):
        expected = False
    elif private or reserved:
        expected = internet and opened
    else:
        expected = internet
    assert passes(render_policy(EgressPolicy(internet, allow, deny), operator), address) is expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EgressPolicy(), True),
        (EgressPolicy(internet=False), False),
        (EgressPolicy(deny=(EVERYTHING,)), False),
        (EgressPolicy(deny=net("0.0.0.0/1", "128.0.0.0/1")), False),
        (EgressPolicy(deny=net("8.8.8.8/32")), True),
        (EgressPolicy(internet=False, allow=net("1.1.1.1/32")), False),
        (EgressPolicy(internet=False, allow=net("169.254.0.22/32")), True),
        (EgressPolicy(internet=False, allow=(EVERYTHING,)), True),
    ],
)
def test_dns_is_open_unless_all_is_denied(policy: EgressPolicy, expected: bool) -> None:
    assert dns_allowed(policy) is expected
    assert ("policy_dns accept" in render_policy(policy)) is expected


def test_a_replacement_flushes_first_so_that_one_load_swaps_all() -> None:
    lines = render_policy(EgressPolicy(deny=net("8.8.8.8/32"))).splitlines()
    assert lines[:2] == ["flush chain inet aenv policy_egress", "flush chain inet aenv policy_dns"]


def test_slot_rules_close_by_default_and_know_their_addresses() -> None:
    rules = render_slot(IPv4Address("10.200.0.6"), IPv4Address("10.200.0.5"), EgressPolicy(internet=False))
    assert rules.count("policy drop") == 2
    assert "ip saddr 10.200.0.5 ip daddr 10.200.0.6" in rules
    assert not passes(rules, "1.1.1.1")


def test_host_rules_open_callbacks_only_when_there_are_any() -> None:
    assert "ip daddr" not in render_host()
    assert 'iifname "aenv*" ip daddr { 10.77.0.1/32 } accept' in render_host(net("10.77.0.1/32"))


def test_entries_are_sorted_by_kind() -> None:
    parsed = parse_entries(["8.8.8.8", " 10.1.2.3/8", "Example.COM", "*.example.org", "1.1.1.1/32"])
    assert parsed.networks == net("8.8.8.8/32", "10.0.0.0/8", "1.1.1.1/32")
    assert parsed.domains == ("example.com", "*.example.org")


@pytest.mark.parametrize(
    "entry",
    ["", " ", "1.2.3", "1.2.3.4/33", "1.2.3.4/", "1.2.3.4/255.0.0.0", "01.2.3.4", "256.1.1.1", "12345", "1.2.3.4-5",
     "a b", "http://x.org", "x.org/24", "*foo.org", "x..org", "-x.org", "1.2.3.4;", "x.org\nadd", "a" * 300, "❤.org"],
)  # fmt: skip
def test_garbage_is_refused(entry: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_entries([entry])


@pytest.mark.parametrize("entry", ["::1", "2001:db8::/32", "::ffff:1.2.3.4"])
def test_ipv6_is_refused_by_name(entry: str) -> None:
    with pytest.raises(InvalidRequestError, match="IPv6"):
        parse_networks([entry])


def test_deny_lists_take_no_domains() -> None:
    with pytest.raises(InvalidRequestError, match=r"denyOut: 'example\.com' is a domain name"):
        parse_networks(["1.1.1.1", "example.com"])


@given(st.text(max_size=40))
def test_parsing_never_fails_in_another_way(text: str) -> None:
    try:
        parsed = parse_entries([text])
    except InvalidRequestError:
        return
    assert len(parsed.networks) + len(parsed.domains) == 1
