"""Settings: one typed model, read from a TOML file and from `AENV_*` environment variables.

Precedence: environment (`AENV_HOME`, `AENV_API_KEY`, nested with `__`: `AENV_NETWORK__SLOT_CIDR`), then the TOML file
named by `AENV_CONFIG` (or `$AENV_HOME/config.toml` where that exists), then the defaults below.
"""

from __future__ import annotations

import os
import tomllib
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from agentenv.errors import ConfigurationError

MIB = 1024 * 1024


def default_home() -> Path:
    """The state directory when nothing names one: `/var/lib/aenv` for root, else `~/.local/share/aenv`."""
    if os.geteuid() == 0:
        return Path("/var/lib/aenv")
    return Path.home() / ".local" / "share" / "aenv"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ApiSettings(_Section):
    """The HTTP surface."""

    domain: str = "aenv.localhost"
    """Sandboxes are reached at `{port}-{id}.{domain}`. Names under `.localhost` resolve to loopback in browsers."""
    advertise_domain: str | None = None
    """The `domain` that clients are told. None: `domain` and the port, so that `http://{get_host(…)}` works."""
    max_body_bytes: int = Field(default=MIB, gt=0)
    """Largest control-plane request body."""


class SandboxSettings(_Section):
    """Defaults and limits of sandboxes."""

    default_timeout_s: int = Field(default=300, gt=0)
    """Life of a sandbox whose creator names none, seconds."""
    max_timeout_s: int = Field(default=24 * 3600, gt=0)
    """Longest life that a caller may ask for, and longest session from start to end."""
    vcpus: int = Field(default=2, ge=1, le=64)
    """Virtual processors of a sandbox."""
    memory_mib: int = Field(default=512, ge=128)
    """Memory of a sandbox. Only what the guest touches is taken from the host."""
    disk_mib: int = Field(default=4096, ge=512)
    """Virtual size of a sandbox's disk. The file is sparse."""
    max_running: int = Field(default=1000, ge=1)
    """Sandboxes that may run at once on this node."""
    max_concurrent_starts: int = Field(default=4, ge=1)
    """Sandboxes that may boot at once."""
    max_queued_starts: int = Field(default=200, ge=0)
    """Creates that may wait for a start place; beyond it the answer is 429."""
    start_timeout_s: float = Field(default=120, gt=0)
    """How long boot to agent-ready may take, seconds."""
    min_free_disk_mib: int = Field(default=512, ge=0)
    """Creation is refused with 507 when the home's file system has less than this free."""
    min_free_memory_mib: int = Field(default=256, ge=0)
    """Creation is refused with 503 when the host would have less than this available."""


class VmmSettings(_Section):
    """Virtual machine monitors."""

    kind: Literal["auto", "qemu"] = "auto"
    """Which VMM to use."""
    acceleration: Literal["auto", "kvm", "tcg"] = "auto"
    """auto: KVM where the probe booted a guest with it, else emulation."""
    qemu: Path = Path("/usr/bin/qemu-system-x86_64")
    """The QEMU program."""
    memory_dir: Path | None = None
    """Where guest memory files of running VMs lie. None: `/dev/shm` if it is a tmpfs with room, else the home."""
    warm_machines: int = Field(default=4, ge=0)
    """VMM processes that wait for machines to load, of the kind that was loaded last. Each has a slot. 0: none."""
    warm_idle_s: float = Field(default=120, gt=0)
    """They end when nobody asked for one like them for so long, seconds."""


class KernelSettings(_Section):
    """The guest kernel."""

    path: Path | None = None
    """An ELF `vmlinux` to use instead of the one in the assets."""
    modules: Path | None = None
    """Directory of that kernel's modules, when it needs any."""


class NetworkSettings(_Section):
    """Network slots."""

    slot_cidr: IPv4Network = IPv4Network("10.200.0.0/16")
    """Host-side addresses of slots; a /30 is taken from it per slot."""
    warm_slots: int = Field(default=4, ge=0)
    """Prepared slots that wait for a sandbox."""
    dns_servers: tuple[str, ...] = ()
    """Resolvers for guests. Empty: those of the host."""
    allow_private: tuple[IPv4Network, ...] = ()
    """Private destinations that every sandbox may reach (for instance a trainer's call-back)."""
    uplink_mtu: int = Field(default=1400, ge=576, le=9000)
    """MTU inside guests; not above that of the host's way out."""


class StorageSettings(_Section):
    """Layers and disks."""

    max_chain_depth: int = Field(default=16, ge=2, le=255)
    """Layers that a disk may consist of before they are merged in the background."""


class SnapshotSettings(_Section):
    """Snapshots, those that pauses make included."""

    budget_mib: int | None = Field(default=None, gt=0)
    """What all snapshots of this node, those that sandboxes are paused in included, may take up on its disk: each layer
    counted once, those of templates not at all. None: no limit."""


class Settings(BaseSettings):
    """All settings of a node. Make it with `load_settings`, which applies the precedence and words the errors."""

    model_config = SettingsConfigDict(
        env_prefix="AENV_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        nested_model_default_partial_update=True,
    )

    home: Path = Field(default_factory=default_home)
    """Where the server keeps its state."""
    api_key: SecretStr | None = None
    """The API key. None: the one in `secrets/api-key`, which is made on first start."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Logs go to standard error."""
    api: ApiSettings = ApiSettings()
    sandbox: SandboxSettings = SandboxSettings()
    vmm: VmmSettings = VmmSettings()
    kernel: KernelSettings = KernelSettings()
    network: NetworkSettings = NetworkSettings()
    storage: StorageSettings = StorageSettings()
    snapshots: SnapshotSettings = SnapshotSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (env_settings, init_settings)

    @property
    def paths(self) -> HomePaths:
        """Where things lie below the home."""
        return HomePaths(self.home)


class HomePaths:
    """The layout of the home directory. Every file below it is listed in docs/ARTIFACTS.md."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lock = home / "server.lock"
        self.journal = home / "state.db"
        self.api_key = home / "secrets" / "api-key"
        self.assets = home / "assets"
        self.templates = home / "templates"
        self.sandboxes = home / "sandboxes"
        self.layers = home / "layers"
        """The layer store."""
        self.disks = home / "disks"
        """The writable layers of disks. On the file system of `layers`: they become layers by a rename."""
        self.snapshots = home / "snapshots"
        """Saved machines; their layers are in `layers`."""
        self.blockd = home / "blockd"
        """State of the block daemon."""
        self.run = home / "run"
        self.blockd_socket = self.run / "blockd.sock"
        self.blockd_log = self.run / "blockd.log"
        self.listening = self.run / "listening"
        """Holds the URL of the running server, for the command line."""

    def sandbox(self, sandbox_id: str) -> Path:
        """Directory of one sandbox: socket of its disk, VMM files, logs."""
        return self.sandboxes / sandbox_id

    def template(self, name: str) -> Path:
        """Directory of one template."""
        return self.templates / name


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the configuration {path} is not valid TOML: {error}") from error


def load_settings(config: Annotated[Path | None, "overrides AENV_CONFIG"] = None) -> Settings:
    """Read the settings of this process.

    Args:
        config: a TOML file; None takes `AENV_CONFIG`, else `$AENV_HOME/config.toml` where it exists.

    Raises:
        ConfigurationError: the file is unreadable, or a setting is unknown or has a wrong value (named in the message).
    """
    explicit = config or (Path(os.environ["AENV_CONFIG"]) if os.environ.get("AENV_CONFIG") else None)
    home = Path(os.environ["AENV_HOME"]) if os.environ.get("AENV_HOME") else default_home()
    values: dict[str, Any] = {}
    if explicit is not None:
        values = _read_toml(explicit)
    elif (home / "config.toml").is_file():
        values = _read_toml(home / "config.toml")
    try:
        settings = Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "configuration"
        raise ConfigurationError(f"setting {where}: {first['msg']}") from error
    return settings.model_copy(update={"home": settings.home.expanduser().absolute()})
