"""Full disks: of the node while sandboxes start, of a guest while files arrive. What runs goes on running."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import NotEnoughSpaceException, Sandbox, TimeoutException

from harness.server import BUILT_HOME, RunningServer
from harness.storage import home_with_little_room

pytestmark = [pytest.mark.vm, pytest.mark.root]


@pytest.fixture
def small_home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    with home_with_little_room(BUILT_HOME, home, 512, "[sandbox]\nmin_free_disk_mib = 128\n"):
        yield home


def test_full_node_refuses_and_recovers(small_home: Path) -> None:
    with RunningServer(small_home) as server:
        options = {"api_url": server.url, "sandbox_url": server.url, "api_key": server.api_key}
        running = Sandbox.create(timeout=600, **options)
        ballast = small_home / "ballast"
        free = shutil.disk_usage(small_home).free
        subprocess.run(["fallocate", "-l", str(free - (100 << 20)), str(ballast)], check=True)

        status, body, headers = server.api("POST", "/v2/sandboxes", {"templateID": "base"})
        assert (status, body["code"]) == (507, 507)
        assert "space" in body["message"] or "disk" in body["message"]
        assert headers["Should-Retry"] == "false"
        assert running.commands.run("echo unharmed").stdout == "unharmed\n"
        assert [row["sandboxID"] for row in server.api("GET", "/v2/sandboxes")[1]] == [running.sandbox_id]

        # Full to the last byte while a guest writes: it is halted, and goes on unharmed when there is room again.
        writer = running.commands.run(
            "until [ -e /tmp/go ]; do sleep 0.1; done; "
            "head -c 60000000 /dev/urandom > data && sync data && md5sum < data && sync",
            background=True,
            timeout=0,
        )
        with (small_home / "more").open("wb", buffering=0) as more, pytest.raises(OSError, match="space"):
            while True:
                more.write(bytes(1 << 20))
        running.files.write("/tmp/go", "")
        halted = False
        while not halted:
            try:
                running.is_running(request_timeout=5)
            except TimeoutException:
                halted = True
        ballast.unlink()
        (small_home / "more").unlink()
        assert writer.wait().stdout == running.commands.run("md5sum < data").stdout
        logs = server.api("GET", f"/sandboxes/{running.sandbox_id}/logs")[1]["logs"]
        assert [entry for entry in logs if "file system is full" in entry["line"]], logs
        second = Sandbox.create(timeout=600, **options)
        assert second.commands.run("echo recovered").stdout == "recovered\n"
        assert running.is_running() is True


def test_full_guest_disk_is_507(server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=600, api_url=server.url, sandbox_url=server.url, api_key=server.api_key)
    try:
        sandbox.commands.run(
            "mkdir -p /mnt/small && mount -t tmpfs -o size=8m tmpfs /mnt/small && chmod 777 /mnt/small", user="root"
        )
        with pytest.raises(NotEnoughSpaceException):
            sandbox.files.write("/mnt/small/big", bytes(20 << 20))
        assert sandbox.commands.run("echo fine").stdout == "fine\n"
        sandbox.files.remove("/mnt/small/big")
        sandbox.files.write("/mnt/small/fits", bytes(1 << 20))
    finally:
        sandbox.kill()
