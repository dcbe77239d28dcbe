"""The block daemon's process: adopted, replaced, started again, and left alone or ended when the server stops."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import uvloop

from agentenv.errors import BlockDaemonError, StorageError
from agentenv.storage import daemon as daemon_module
from agentenv.storage.blockd_messages import Upper
from agentenv.storage.daemon import LOCK_NAME, BlockDaemonProcess
from agentenv.vmm import console
from agentenv.vmm.console import CAP_BYTES
from unit.storage.storage_fakes import ask, end_daemon, eventually, make_program


def process(home: Path, program: Path) -> BlockDaemonProcess:
    return BlockDaemonProcess(
        program, state=home / "blockd", socket=home / "run" / "blockd.sock", log_file=home / "run" / "blockd.log"
    )


async def open_device(daemon: BlockDaemonProcess, home: Path) -> None:
    (home / "d").mkdir(exist_ok=True)
    await daemon.client.open("d", [], Upper(home / "d"), virtual_size=4096)


async def started_again(daemon: BlockDaemonProcess, old: int | None) -> int:
    await eventually(lambda: daemon.pid not in (None, old))
    await daemon.client.list()
    assert daemon.pid is not None
    return daemon.pid


def running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


async def test_it_is_private_and_detached(home: Path, daemon: BlockDaemonProcess) -> None:
    assert daemon.pid is not None
    assert os.getsid(daemon.pid) == daemon.pid
    assert (home / "blockd").stat().st_mode & 0o777 == 0o700
    assert (home / "run" / "blockd.log").stat().st_mode & 0o777 == 0o600
    assert "listens" in (home / "run" / "blockd.log").read_text()
    await daemon.start()  # idempotent


async def test_a_server_that_stops_leaves_devices_alone(home: Path, program: Path) -> None:
    first = process(home, program)
    await first.start()
    await open_device(first, home)
    pid = first.pid
    await first.close()
    await first.close()
    assert pid is not None
    assert running(pid)
    with pytest.raises(BlockDaemonError):
        await first.client.list()
    second = process(home, program)
    await second.start()
    assert second.pid == pid
    assert [device.name for device in await second.client.list()] == ["d"]
    os.kill(pid, signal.SIGKILL)  # an adopted one is supervised, too
    await started_again(second, pid)
    assert [device.name for device in await second.client.list()] == ["d"]
    await second.client.close_device("d", remove_upper=True)
    last = second.pid
    await second.close()
    assert last is not None
    assert not running(last), "a daemon without devices is ended with the server"


async def test_two_servers_at_once_share_one_daemon(home: Path, program: Path) -> None:
    (home / "blockd").mkdir()
    (home / "blockd" / "start-slowly").touch()
    first = process(home, program)
    starting = asyncio.create_task(first.start())
    await eventually(lambda: daemon_module._is_locked(home / "blockd" / LOCK_NAME))
    # The lock is there, the socket is not: what a server finds that was killed at this moment.
    second = process(home, program)
    await second.start()
    await starting
    assert second.pid == first.pid
    await second.close()
    await first.close()


async def test_it_is_started_again_with_growing_pauses(
    home: Path, daemon: BlockDaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "_FIRST_PAUSE_S", 0.001)
    restarts: list[int] = []

    async def note() -> None:
        restarts.append(1)

    daemon.on_start(note)
    await open_device(daemon, home)
    pid = daemon.pid
    for _ in range(3):
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert [device.name for device in await daemon.client.list()] == ["d"], "the call waited for the new one"
        pid = await started_again(daemon, pid)
    assert len(restarts) == 3
    (home / "blockd" / "fail-to-start").touch()
    os.kill(pid, signal.SIGKILL)
    call = asyncio.create_task(daemon.client.list())
    log = home / "run" / "blockd.log"
    await eventually(lambda: log.read_text().count("told not to start") >= 3)
    assert daemon.pid is None
    (home / "blockd" / "fail-to-start").unlink()
    assert [device.name for device in await call] == ["d"]
    await daemon.client.close_device("d", remove_upper=True)


async def test_a_daemon_that_does_not_start_is_an_error_with_its_words(home: Path, program: Path) -> None:
    (home / "blockd").mkdir()
    (home / "blockd" / "fail-to-start").touch()
    daemon = process(home, program)
    with pytest.raises(StorageError, match="ended at its start: told not to start"):
        await daemon.start()
    await daemon.close()
    missing = process(home, home / "missing")
    with pytest.raises(StorageError, match=r"cannot open the block daemon .*missing.*make setup"):
        await missing.start()
    await missing.close()


async def test_another_protocol_version_is_replaced_in_order(home: Path, program: Path) -> None:
    old = make_program(home / "old-blockd", protocol=1)
    first = process(home, old)
    await first.start()
    await open_device(first, home)
    await first.client.export_nbd("d", home / "d.sock")
    before = first.pid
    await first.close()
    await end_daemon(home / "run" / "blockd.sock")
    # What an upgrade finds: the daemon of the version before.
    make_program(old, protocol=0)
    elder = process(home, old)
    starting = asyncio.create_task(elder.start())
    elder_pid = await greeted(home)
    starting.cancel()
    await asyncio.wait([starting])
    await elder.close()
    assert running(elder_pid)
    second = process(home, program)
    await second.start()
    assert second.pid not in (None, before, elder_pid)
    assert not running(elder_pid)
    (device,) = await second.client.list()
    assert device.exports[0].path == home / "d.sock"
    await second.client.close_device("d", remove_upper=True)
    await second.close()


async def greeted(home: Path) -> int:
    from agentenv.storage.blockd import BlockClient

    client = BlockClient(home / "run" / "blockd.sock")
    async with asyncio.timeout(20):
        while True:
            try:
                return (await client.greeting()).pid
            except BlockDaemonError:
                await asyncio.sleep(0.01)


async def test_another_build_is_replaced(home: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = process(home, program)
    await first.start()
    await open_device(first, home)
    pid = first.pid
    await first.close()
    monkeypatch.undo()  # from here on programs are compared, and a script is never the interpreter that runs it
    second = process(home, program)
    await second.start()
    assert second.pid not in (None, pid)
    assert [device.name for device in await second.client.list()] == ["d"]
    await second.client.close_device("d", remove_upper=True)
    await second.close()


async def test_a_removed_binary_can_still_be_started(home: Path, program: Path, daemon: BlockDaemonProcess) -> None:
    pid = daemon.pid
    assert pid is not None
    program.unlink()
    os.kill(pid, signal.SIGKILL)
    await started_again(daemon, pid)


async def test_one_that_does_not_answer_is_ended(home: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = process(home, program)
    await first.start()
    await open_device(first, home)
    pid = first.pid
    assert pid is not None
    await first.close()
    (home / "run" / "blockd.sock").unlink()
    monkeypatch.setattr(daemon_module, "_START_TIMEOUT_S", 3.0)
    second = process(home, program)
    await second.start()
    assert second.pid not in (None, pid)
    assert not running(pid)
    await second.client.close_device("d", remove_upper=True)
    await second.close()


async def test_a_start_that_is_cancelled_leaves_no_idle_daemon(home: Path, program: Path) -> None:
    (home / "blockd").mkdir()
    (home / "blockd" / "start-slowly").touch()
    daemon = process(home, program)
    starting = asyncio.create_task(daemon.start())
    await eventually(lambda: daemon_module._is_locked(home / "blockd" / LOCK_NAME))
    starting.cancel()
    await asyncio.wait([starting])
    await daemon.close()
    await eventually(lambda: not daemon_module._is_locked(home / "blockd" / LOCK_NAME))


async def test_its_log_is_capped(home: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_PERIOD_S", 0.01)
    daemon = process(home, program)
    await daemon.start()
    log = home / "run" / "blockd.log"
    with log.open("ab") as file:
        file.write(b"a line\n" * (CAP_BYTES // 7 + 1))
    await eventually(lambda: log.stat().st_size <= CAP_BYTES)
    await daemon.close()


async def test_a_callback_that_fails_does_not_end_the_supervision(home: Path, daemon: BlockDaemonProcess) -> None:
    async def fail() -> None:
        raise StorageError("on purpose")

    async def crash() -> None:
        raise RuntimeError("on purpose")

    daemon.on_start(fail)
    daemon.on_start(crash)
    pid = daemon.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    second = await started_again(daemon, pid)
    os.kill(second, signal.SIGKILL)
    await started_again(daemon, second)
    assert await ask(home / "run" / "blockd.sock", "list") == {"devices": []}


def test_it_works_under_the_servers_event_loop(home: Path, program: Path) -> None:
    async def main() -> list[str]:
        daemon = process(home, program)
        await daemon.start()
        await open_device(daemon, home)
        pid = daemon.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        names = [device.name for device in await daemon.client.list()]
        await daemon.client.close_device("d", remove_upper=True)
        await daemon.close()
        return names

    assert uvloop.run(main()) == ["d"]
