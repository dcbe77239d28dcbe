"""Layers, templates and disks for tests: homes that share what was built, and disks of raw images without a server.

Nothing here knows what a test checks.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.cli.provision import link_home
from agentenv.config import Settings
from agentenv.guest.assets import load_assets
from agentenv.storage.daemon import BlockDaemonProcess
from agentenv.storage.disks import DiskStore
from agentenv.storage.images import write_stack_to
from agentenv.storage.layers import LayerStore
from agentenv.templates.raw_images import layer_of_image
from agentenv.templates.store import Template, TemplateStore, owner_of
from agentenv.vmm.base import Disk

DAEMON_NAME = "aenv-blockd"


def _settings_of(home: Path) -> Settings:
    """Settings of a home, whatever `AENV_HOME` says."""
    return Settings().model_copy(update={"home": home})


def share_built(built: Path, home: Path) -> None:
    """Give an empty home the assets and the base template of another, without copying where that is possible."""
    link_home(_settings_of(home), built)


def register_image(home: Path, template_id: str, image: Path) -> Template:
    """Make a template of a home from a raw disk image, which stays as it is."""
    settings = _settings_of(home)
    with closing(LayerStore(home / "layers")) as layers:
        layer = layer_of_image(image, layers, owner_of(template_id))
        template = Template(
            template_id=template_id,
            names=(template_id,),
            layers=(layer.digest,),
            vcpus=1,
            memory_mib=256,
            disk_mib=image.stat().st_size >> 20,
            default_user="root",
        )
        TemplateStore(settings.paths, settings, layers).register(template)
    return template


@contextmanager
def home_with_little_room(built: Path, home: Path, room_mib: int, config: str) -> Iterator[None]:
    """Make a home on a file system of its own, which holds a copy of what was built and so much more."""
    image = home.with_suffix(".image")
    home.mkdir()
    shared = [path for name in ("assets", "layers") for path in (built / name).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in shared)
    with image.open("wb") as file:
        file.truncate(size + (size >> 5) + (room_mib << 20))
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(home)], check=True)
    try:
        share_built(built, home)
        (home / "config.toml").write_text(config)
        yield
    finally:
        subprocess.run(["umount", str(home)], check=True)
        image.unlink()


def daemons_of(home: Path) -> list[int]:
    """Process ids of block daemons that work for a home."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if Path(words[0]).name.startswith(DAEMON_NAME) and any(word.startswith(f"{home}/") for word in words[1:]):
            found.append(int(process.name))
    return found


def kill_daemon(home: Path) -> None:
    """kill -9 of the block daemon of a home, which must have one."""
    (pid,) = daemons_of(home)
    os.kill(pid, signal.SIGKILL)


@dataclass
class Storage:
    """The storage room of a home, running without a server."""

    home: Path
    layers: LayerStore
    disks: DiskStore

    async def disk(self, name: str, image: Path, directory: Path) -> Disk:
        """A disk with the content of a raw image, with its socket in a directory that has its owner already."""
        layer = layer_of_image(image, self.layers, owner_of(name))
        return await self.disks.create(name, (layer.digest,), 0, directory)

    async def content(self, name: str, destination: Path) -> Path:
        """Write what a disk holds now into a raw file."""
        await self.disks.capture(name)
        chain = await self.disks.chain(name)
        with destination.open("wb") as file:
            write_stack_to([layer.path for layer in chain], file.fileno())
        return destination


@asynccontextmanager
async def storage_of(home: Path) -> AsyncIterator[Storage]:
    """Start the storage room of a home, as the server does; at the end its disks are removed and its daemon ends."""
    settings = _settings_of(home)
    paths = settings.paths
    async with AsyncExitStack() as stack:
        layers = LayerStore(paths.layers)
        stack.callback(layers.close)
        daemon = BlockDaemonProcess(
            load_assets(settings).blockd, state=paths.blockd, socket=paths.blockd_socket, log_file=paths.blockd_log
        )
        await daemon.start()
        stack.push_async_callback(daemon.close)
        disks = DiskStore(daemon, layers, paths.disks)
        await disks.start()
        stack.push_async_callback(disks.close)
        stack.push_async_callback(disks.reconcile, ())
        yield Storage(home, layers, disks)
