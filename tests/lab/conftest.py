"""The fixture `lab`: one emulated host for all tests of this directory, and its console and kernel log on failure."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from lab.host import Lab
from lab.image import HOST_MODULES, cache_directory, initramfs_for, prepare_image
from lab.machine import EmulatedHost
from lab.results import LabError

ROOT = Path(__file__).parents[2]
GUEST_BINARY = ROOT / "build/aenv-guest"
IMAGE_DEADLINE_S = 900
_running: list[Lab] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Making the root disk needs root (`tests/conftest.py` skips by this mark), and time before the first test."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.root)
            item.add_marker(pytest.mark.timeout(IMAGE_DEADLINE_S))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The emulated host, booted once."""
    for tool, package in (("qemu-system-x86_64", "qemu-system-x86"), ("setpriv", "util-linux")):
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is missing: install {package}, or run `make setup`")
    if not GUEST_BINARY.exists():
        pytest.fail(f"{GUEST_BINARY} is missing: run `make setup`")
    began = time.monotonic()
    image = prepare_image(cache_directory())
    host = EmulatedHost(image, initramfs_for(image, GUEST_BINARY))
    prepared_s = time.monotonic() - began
    host.start()
    try:
        lab = Lab(host)
        lab.agent.initialize()
        for module in sorted(image.modules.glob("*.ko")):
            if module.stem in ("nbd", "ublk_drv"):
                lab.put(module, f"{HOST_MODULES}/{module.name}")
        print(f"lab: image {prepared_s:.1f} s, boot {host.boot_s:.1f} s")
        _running.append(lab)
        yield lab
    finally:
        _running.clear()
        host.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the host said to the report of a failed test."""
    report = yield
    if report.failed and _running:
        lab = _running[0]
        report.sections.append(("lab console", lab.host.console()[-4000:]))
        try:
            log = lab.shell("dmesg | tail -n 40", echo=False, timeout_s=20)
        except LabError as error:
            log = f"not available: {error}"
        report.sections.append(("lab dmesg", log))
    return report
