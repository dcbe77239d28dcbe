"""Claims on slot indexes: exclusive between servers, complete at once, found again after a crash."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from agentenv.errors import CapacityError
from agentenv.network.claims import Claims


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def server(tmp_path: Path, run_dir: Path, name: str, *opened: str) -> Claims:
    home = tmp_path / name
    home.mkdir(exist_ok=True)
    claims = Claims(home, run_dir)
    with claims.host_lock():
        claims.register(tuple(IPv4Network(text) for text in opened))
    return claims


def test_a_claim_names_its_home(tmp_path: Path, run_dir: Path) -> None:
    claims = server(tmp_path, run_dir, "a")
    assert claims.take(5, 10) == 5
    assert (run_dir / "slots" / "5").read_text().strip() == str(tmp_path / "a")


def test_two_servers_never_share_an_index(tmp_path: Path, run_dir: Path) -> None:
    servers = [server(tmp_path, run_dir, name) for name in "abcd"]
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda number: servers[number % 4].take(0, 200), range(200)))
    assert sorted(taken) == list(range(200))
    assert sum(len(one.owned()) for one in servers) == 200
    with pytest.raises(CapacityError):
        servers[0].take(0, 200)


def test_taking_wraps_around_and_given_back_indexes_come_again(tmp_path: Path, run_dir: Path) -> None:
    claims = server(tmp_path, run_dir, "a")
    assert [claims.take(2, 4) for _ in range(4)] == [2, 3, 0, 1]
    claims.give_back(3)
    claims.give_back(3)
    assert claims.take(0, 4) == 3
    assert not claims.try_take(3)


def test_a_later_process_of_the_same_home_finds_its_claims(tmp_path: Path, run_dir: Path) -> None:
    server(tmp_path, run_dir, "a").take(7, 10)
    server(tmp_path, run_dir, "b").take(7, 10)
    assert server(tmp_path, run_dir, "a").owned() == {7}
    assert server(tmp_path, run_dir, "b").owned() == {8}


def test_claims_of_a_vanished_home_are_abandoned(tmp_path: Path, run_dir: Path) -> None:
    one, two = server(tmp_path, run_dir, "a"), server(tmp_path, run_dir, "b")
    one.take(0, 10)
    two.take(0, 10)
    assert two.abandoned() == set()
    (tmp_path / "a").rmdir()
    assert two.abandoned() == {0}
    assert two.servers() == [tmp_path / "b"]


def test_claims_outlive_the_registration(tmp_path: Path, run_dir: Path) -> None:
    claims = server(tmp_path, run_dir, "a")
    claims.take(3, 10)
    claims.unregister()
    assert claims.owned() == {3}
    assert claims.any_left()
    claims.give_back(3)
    assert not claims.any_left()


def test_opened_addresses_are_those_of_the_registered_servers(tmp_path: Path, run_dir: Path) -> None:
    one = server(tmp_path, run_dir, "a", "10.0.0.5/32")
    two = server(tmp_path, run_dir, "b", "10.0.0.5/32", "10.0.0.6/32")
    assert [str(network) for network in one.opened_by_all()] == ["10.0.0.5/32", "10.0.0.6/32"]
    two.unregister()
    assert [str(network) for network in one.opened_by_all()] == ["10.0.0.5/32"]


def test_foreign_files_are_no_claims(tmp_path: Path, run_dir: Path) -> None:
    claims = server(tmp_path, run_dir, "a")
    (run_dir / "slots" / "notes.txt").write_text("x")
    (run_dir / "slots" / "4").write_bytes(b"\xff\xfe")
    assert claims.owned() == set()
    assert claims.abandoned() == set()
    assert claims.take(4, 6) == 5
