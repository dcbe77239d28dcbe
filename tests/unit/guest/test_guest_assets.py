"""Building and loading guest assets, with a chosen kernel so that no package is fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from datetime import UTC, datetime
from pathlib import Path

import elf_samples
import pytest

from agentenv import durable
from agentenv.config import KernelSettings, Settings
from agentenv.errors import AssetError
from agentenv.guest import assets as assets_module
from agentenv.guest import kernel
from agentenv.guest.assets import assets_are_current, build_assets, load_assets
from agentenv.snapshots.encoding import encode
from agentenv.snapshots.manifest import (
    Environment,
    LayerReference,
    MachineShape,
    SnapshotKind,
    SnapshotManifest,
    StateFile,
)


class Home:
    """A home, a chosen kernel with one module, and a guest program."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kernel = directory / "chosen-kernel"
        self.kernel.write_bytes(elf_samples.vmlinux())
        self.modules = directory / "modules"
        self.modules.mkdir()
        for name in ("virtio_mmio", "virtio_blk", "ext4", "virtio_net"):
            (self.modules / f"{name}.ko").write_bytes(elf_samples.module("", name=name))
        self.program = directory / "aenv-guest"
        self.set_program("1.0.0")
        self.blockd = directory / "aenv-blockd"
        self.set_blockd("2.0.0")
        self.settings = Settings(home=directory / "home", kernel=KernelSettings(path=self.kernel, modules=self.modules))
        self.phases: list[str] = []

    def set_program(self, version: str) -> None:
        self.program.write_bytes(elf_samples.version_program(version))
        self.program.chmod(0o755)

    def set_blockd(self, version: str) -> None:
        self.blockd.write_bytes(elf_samples.version_program(version))
        self.blockd.chmod(0o755)

    def progress(self, _phase: str, detail: str, _fraction: float | None) -> None:
        self.phases.append(detail)

    def build(self) -> assets_module.GuestAssets:
        self.phases.clear()
        return build_assets(self.settings, self.program, self.blockd, self.progress)

    def names(self) -> set[str]:
        return {path.name for path in self.settings.paths.assets.iterdir()}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_what_was_built_is_loaded(home: Home) -> None:
    built = home.build()
    assert built == load_assets(home.settings)
    assert built.kernel.read_bytes() == elf_samples.vmlinux()
    assert built.kernel_version == "6.99.1-test"
    assert built.guest_version == "1.0.0"
    assert home.program.read_bytes() in built.initramfs.read_bytes()
    assert b"/lib/modules/virtio_mmio.ko\n/lib/modules/virtio_blk.ko\n" in built.initramfs.read_bytes()


def test_a_second_build_writes_nothing(home: Home) -> None:
    first = home.build()
    before = {path: path.stat().st_mtime_ns for path in home.settings.paths.assets.iterdir()}
    assert home.build() == first
    assert home.phases == ["kernel 6.99.1-test"]
    assert {path: path.stat().st_mtime_ns for path in home.settings.paths.assets.iterdir()} == before


def test_another_guest_program_makes_another_initramfs_only(home: Home) -> None:
    first = home.build()
    written = first.kernel.stat().st_mtime_ns
    home.set_program("1.0.1")
    second = home.build()
    assert second.guest_version == "1.0.1"
    assert second.initramfs != first.initramfs
    assert first.initramfs.exists(), "a running server still boots from it"
    assert (second.kernel, second.kernel.stat().st_mtime_ns) == (first.kernel, written)


def test_the_block_daemon_is_installed_beside_those_that_still_run(home: Home) -> None:
    first = home.build()
    assert first.blockd.name.startswith("aenv-blockd-2.0.0-")
    assert first.blockd.read_bytes() == home.blockd.read_bytes()
    assert first.blockd.stat().st_mode & 0o777 == 0o755
    home.set_blockd("aenv-blockd 2.0.1")
    second = home.build()
    assert second.blockd.name.startswith("aenv-blockd-2.0.1-")
    assert first.blockd.exists(), "a server that supervises the older one starts it again when it dies"
    assert (second.kernel, second.initramfs) == (first.kernel, first.initramfs)


def test_assets_of_an_older_version_are_told_apart_and_completed(home: Home) -> None:
    built = home.build()
    manifest = home.settings.paths.assets / assets_module.MANIFEST
    assert assets_are_current(home.settings.paths.assets)
    manifest.write_text(
        json.dumps({name: part for name, part in json.loads(manifest.read_text()).items() if name != "blockd"})
    )
    built.blockd.unlink()
    assert not assets_are_current(home.settings.paths.assets)
    with pytest.raises(AssetError, match="another version: run `make setup`"):
        load_assets(home.settings)
    assert home.build() == built
    assert built.blockd.exists()


def test_old_files_do_not_pile_up(home: Home) -> None:
    for number in range(5):
        home.set_program(f"1.0.{number}")
        home.set_blockd(f"2.0.{number}")
        home.kernel.write_bytes(elf_samples.vmlinux(f"6.99.{10**number}-test"))
        newest = home.build()
    for prefix, count, current in (
        ("initramfs-", 3, newest.initramfs),
        ("vmlinux-", 2, newest.kernel),
        ("aenv-blockd-", 3, newest.blockd),
    ):
        kept = [name for name in home.names() if name.startswith(prefix)]
        assert len(kept) == count
        assert current.name in kept


def test_what_saved_machines_need_stays(home: Home) -> None:
    first = home.build()
    environment = Environment(
        vmm="qemu",
        vmm_version="7.2",
        acceleration="tcg",
        boot_mode="microvm",
        cpu_model="max",
        cpu_features="sha256:" + 64 * "0",
        tsc_khz=0,
        kernel_version=first.kernel_version,
        kernel_digest=f"sha256:{hashlib.sha256(first.kernel.read_bytes()).hexdigest()}",
        initramfs_digest=f"sha256:{hashlib.sha256(first.initramfs.read_bytes()).hexdigest()}",
    )
    layer = LayerReference("sha256:" + 64 * "1", 1)
    manifest = SnapshotManifest(
        snapshot_id="pause-i1-1",
        created_at=datetime(2030, 1, 1, tzinfo=UTC),
        kind=SnapshotKind.FULL,
        architecture="x86_64",
        sandbox_id="i1",
        template_id="base",
        machine=MachineShape(1, 1, 1),
        agent_version="1",
        disk_layers=(layer,),
        default_user="user",
        environment=environment,
        memory_layers=(layer,),
        state=StateFile("state", 1, layer.digest),
    )
    for name, content in (("pause-i1-1", encode(manifest)), ("damaged", b"{")):
        directory = home.settings.paths.snapshots / name
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_bytes(content)
    for number in range(5):
        home.set_program(f"1.0.{number}")
        home.kernel.write_bytes(elf_samples.vmlinux(f"6.99.{10**number}-test"))
        home.build()
    assert first.kernel.exists()
    assert first.initramfs.exists()
    (home.settings.paths.snapshots / "pause-i1-1" / "manifest.json").unlink()
    home.set_program("1.1")
    home.build()
    assert not first.kernel.exists()
    assert not first.initramfs.exists()


def test_another_kernel_is_noticed(home: Home) -> None:
    home.build()
    home.kernel.write_bytes(elf_samples.vmlinux("6.99.2-longer-name"))
    with pytest.raises(AssetError, match=r"another choice of kernel.*make setup"):
        load_assets(home.settings)
    assert home.build().kernel_version == "6.99.2-longer-name"


@pytest.mark.parametrize("asset", ["kernel", "initramfs", "blockd"])
def test_a_damaged_asset_is_named_and_mended(home: Home, asset: str) -> None:
    path: Path = getattr(home.build(), asset)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    with pytest.raises(AssetError, match=f"{path.name} is missing or damaged: run `make setup`"):
        load_assets(home.settings)
    home.build()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"kernel": 1}', '{"kernel": {}, "initramfs": {}}'])
def test_a_damaged_manifest_is_no_crash(home: Home, text: str) -> None:
    built = home.build()
    (home.settings.paths.assets / assets_module.MANIFEST).write_text(text)
    with pytest.raises(AssetError, match="make setup"):
        load_assets(home.settings)
    assert home.build() == built


def test_an_interrupted_build_leaves_no_asset(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_image: bytes) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel, "extract_vmlinux", interrupted)
    with pytest.raises(KeyboardInterrupt):
        home.build()
    assert home.names() == {".lock"}


def test_what_a_killed_build_left_is_removed(home: Home) -> None:
    leftover = home.settings.paths.assets / ".build-killed" / "tree"
    leftover.mkdir(parents=True)
    (leftover.parent / "half.deb").write_bytes(b"half")
    home.build()
    assert not leftover.parent.exists()


def test_builds_wait_for_each_other(home: Home) -> None:
    directory = home.settings.paths.assets
    directory.mkdir(parents=True)
    waits = threading.Event()
    built: list[assets_module.GuestAssets] = []

    def progress(_phase: str, detail: str, _fraction: float | None) -> None:
        if "waiting" in detail:
            waits.set()

    def build() -> None:
        built.append(build_assets(home.settings, home.program, home.blockd, progress))

    builder = threading.Thread(target=build)
    with durable.exclusive_lock(directory / ".lock", lambda: None):
        builder.start()
        assert waits.wait(timeout=60)
        assert home.names() == {".lock"}
    builder.join(timeout=60)
    assert built == [load_assets(home.settings)]


def test_without_assets_the_message_names_the_command(home: Home) -> None:
    with pytest.raises(AssetError, match=r"no guest assets in .*: run `make setup`"):
        load_assets(home.settings)


def test_unusable_programs_are_refused(home: Home) -> None:
    home.program.unlink()
    with pytest.raises(AssetError, match="cannot read the guest program"):
        home.build()
    home.set_program("1.0.0")
    home.set_blockd("a version with spaces")
    with pytest.raises(AssetError, match=r"block daemon .* does not say its version"):
        home.build()
    home.blockd.unlink()
    with pytest.raises(AssetError, match="cannot read the block daemon"):
        home.build()
    home.set_blockd("2.0.0")
    home.program.write_bytes(b"text")
    with pytest.raises(AssetError, match="not a 64-bit ELF"):
        home.build()
    home.set_program("a version with spaces")
    with pytest.raises(AssetError, match="does not say its version"):
        home.build()
    with pytest.raises(AssetError, match="no guest assets"):
        load_assets(home.settings)
