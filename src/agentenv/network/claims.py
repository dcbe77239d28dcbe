"""Who owns which slot index on this machine: files below `/run/aenv`, written before any kernel object exists.

Several servers with different homes may share one machine. `servers/<hash of home>/home` registers a server and holds
the path of its home; `slots/<index>` is a hard link to it, so that a claim appears at once, complete, and for one
server only. What a claim names and no live sandbox owns is left over from a crash: its owner's next start removes
it, or anybody does once the home is gone. This file makes no kernel object and knows no firewall.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv4Network, NetmaskValueError
from pathlib import Path

from agentenv.errors import CapacityError, NetworkError

RUN_DIR = Path("/run/aenv")


class Claims:
    """The claims of one server (one home). Methods block on the local file system only; they are thread-safe."""

    def __init__(self, home: Path, run_dir: Path = RUN_DIR) -> None:
        self.home = home.absolute()
        self.run_dir = run_dir
        self._slots = run_dir / "slots"
        self._servers = run_dir / "servers"
        self._own = self._servers / hashlib.sha256(os.fsencode(self.home)).hexdigest()[:24]

    @contextlib.contextmanager
    def host_lock(self) -> Iterator[None]:
        """Hold the machine-wide lock under which servers change what they share (host rules, registrations).

        Raises:
            NetworkError: the lock file cannot be made.
        """
        try:
            self.run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = os.open(self.run_dir / "host.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NetworkError(f"cannot lock {self.run_dir}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def register(self, opened: tuple[IPv4Network, ...]) -> None:
        """Enter this server (again). Call it with the host lock held.

        Args:
            opened: addresses of this host that the server's sandboxes may reach.

        Raises:
            NetworkError: the files cannot be written.
        """
        try:
            for directory in (self._slots, self._own):
                directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            _write_atomically(self._own / "opened", "".join(f"{network}\n" for network in opened))
            # Never replaced while it exists: claims are links to it.
            if not (self._own / "home").exists():
                _write_atomically(self._own / "home", f"{self.home}\n")
        except OSError as error:
            raise NetworkError(f"cannot register the server in {self.run_dir}: {error.strerror}") from error

    def unregister(self) -> None:
        """Remove this server's registration (host lock held). Its claims, if any, stay valid."""
        shutil.rmtree(self._own, ignore_errors=True)

    def servers(self) -> list[Path]:
        """Homes of all registered servers whose home still exists; registrations of vanished homes are removed."""
        homes: list[Path] = []
        for directory in _entries(self._servers):
            home = _read_home(directory / "home")
            if home is None or not home.is_dir():
                shutil.rmtree(directory, ignore_errors=True)
            else:
                homes.append(home)
        return homes

    def opened_by_all(self) -> list[IPv4Network]:
        """The addresses of this host that any registered server opened."""
        found: set[IPv4Network] = set()
        for directory in _entries(self._servers):
            try:
                lines = (directory / "opened").read_text().split()
                found.update(IPv4Network(line) for line in lines)
            except (OSError, AddressValueError, NetmaskValueError):
                continue
        return sorted(found)

    def try_take(self, index: int) -> bool:
        """Claim an index; False if somebody has it.

        Raises:
            NetworkError: the claim cannot be written.
        """
        try:
            os.link(self._own / "home", self._slots / str(index))
        except FileExistsError:
            return False
        except OSError as error:
            raise NetworkError(f"cannot claim network slot {index} in {self._slots}: {error.strerror}") from error
        return True

    def take(self, start: int, capacity: int) -> int:
        """Claim the first free index at or after `start`, wrapping around at `capacity`.

        Raises:
            CapacityError: all are taken.
            NetworkError: the claim cannot be written.
        """
        taken = {entry.name for entry in _entries(self._slots)}
        for offset in range(capacity):
            index = (start + offset) % capacity
            if str(index) not in taken and self.try_take(index):
                return index
        raise CapacityError(f"all {capacity} network slots of this machine are taken; enlarge network.slot_cidr")

    def give_back(self, index: int) -> None:
        """Drop a claim, after everything that it stands for is gone. Idempotent.

        Raises:
            NetworkError: the file cannot be removed.
        """
        try:
            (self._slots / str(index)).unlink(missing_ok=True)
        except OSError as error:
            raise NetworkError(f"cannot drop the claim of network slot {index}: {error.strerror}") from error

    def owned(self) -> set[int]:
        """Indexes that this home has claimed, also by a former process."""
        return {index for index, home in self._all() if home == self.home}

    def abandoned(self) -> set[int]:
        """Indexes whose owner's home does not exist any more."""
        return {index for index, home in self._all() if home is not None and not home.is_dir()}

    def any_left(self) -> bool:
        """Whether anybody on this machine holds a slot."""
        return any(True for _ in self._all())

    def _all(self) -> Iterator[tuple[int, Path | None]]:
        for entry in _entries(self._slots):
            if entry.name.isascii() and entry.name.isdigit():
                yield int(entry.name), _read_home(entry)


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _read_home(file: Path) -> Path | None:
    try:
        text = file.read_text().removesuffix("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return Path(text) if text else None


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)
