"""The initramfs archive, read back with the system's own cpio."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import elf_samples
import pytest

from agentenv.errors import AssetError
from agentenv.guest.initramfs import MODULE_ORDER, CpioWriter, build_initramfs
from agentenv.guest.kernel import Module

needs_cpio = pytest.mark.skipif(shutil.which("cpio") is None, reason="needs cpio")
PROGRAM = elf_samples.version_program("1.0")
MODULES = (Module("b_second", b"\x7fELF second"), Module("a_first", b"\x7fELF f"))


def _cpio(archive: bytes, option: str) -> str:
    """A listing of the archive, which `cpio` also checks for its form."""
    return subprocess.run(["cpio", option, "--quiet"], input=archive, capture_output=True, check=True).stdout.decode()


@needs_cpio
def test_the_system_reads_what_was_written(tmp_path: Path) -> None:
    archive = build_initramfs(PROGRAM, MODULES)
    names = _cpio(archive, "-t").split()
    assert names.index("lib/modules") < names.index("lib/modules/b_second.ko")
    subprocess.run(
        ["cpio", "-id", "--quiet", "--no-preserve-owner", "init", "lib/modules/*", "etc/aenv/*"],
        input=archive,
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert (tmp_path / "init").read_bytes() == PROGRAM
    assert (tmp_path / "init").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "lib/modules/a_first.ko").read_bytes() == b"\x7fELF f"
    order = (tmp_path / MODULE_ORDER).read_text().splitlines()
    assert order == ["/lib/modules/b_second.ko", "/lib/modules/a_first.ko"]


@needs_cpio
def test_the_console_is_a_device_node() -> None:
    archive = build_initramfs(PROGRAM, ())
    listing = _cpio(archive, "-tv")
    (console,) = [line for line in listing.splitlines() if line.endswith("dev/console")]
    assert console.startswith("crw-------")
    assert "5,   1" in console


@needs_cpio
@pytest.mark.parametrize("length", range(9))
def test_every_alignment_of_names_and_contents(length: int) -> None:
    writer = CpioWriter()
    writer.file("n" * (length + 1), b"x" * length)
    writer.file("last", b"end")
    archive = writer.finish()
    assert len(archive) % 512 == 0
    assert _cpio(archive, "-t").split() == ["n" * (length + 1), "last"]


def test_the_same_input_gives_the_same_bytes_and_the_order_counts() -> None:
    assert build_initramfs(PROGRAM, MODULES) == build_initramfs(PROGRAM, MODULES)
    assert build_initramfs(PROGRAM, MODULES) != build_initramfs(PROGRAM, MODULES[::-1])


def test_a_program_that_is_none_is_refused() -> None:
    with pytest.raises(AssetError, match="make setup"):
        build_initramfs(b"#!/bin/sh\n", ())
