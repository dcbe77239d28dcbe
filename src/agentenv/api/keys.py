"""The API key: where it comes from and how a presented one is checked. The key is never logged."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import structlog

from agentenv.config import Settings
from agentenv.errors import ConfigurationError
from agentenv.ids import new_api_key, secrets_equal

log = structlog.get_logger(__name__)


def load_or_create_api_key(settings: Settings) -> str:
    """Return the configured key, else the one in `$AENV_HOME/secrets/api-key`, which is made when missing.

    The file is written under another name and linked into place, so that it is never seen half-written and two servers
    that start at the same time agree on one key.

    Raises:
        ConfigurationError: the key is empty or unusable in a header, or the file cannot be read or written.
    """
    if settings.api_key is not None:
        return _checked(settings.api_key.get_secret_value(), "setting api_key")
    path = settings.paths.api_key
    try:
        key = _read(path)
        if key is None:
            _create(path, new_api_key())
            key = _read(path)
    except OSError as error:
        raise ConfigurationError(f"cannot read or make the API key file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the API key file {path} is not text; remove it to get a new key") from error
    return _checked(key or "", str(path))


def key_matches(presented: str, key: str) -> bool:
    """Compare a presented key with ours in constant time."""
    return secrets_equal(presented, key)


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except FileNotFoundError:
        return None
    if mode & 0o077:
        log.warning("api_key_file_is_open_to_others", path=str(path), mode=oct(mode), fix=f"chmod 600 {path}")
    return content.decode("utf-8").strip()


def _create(path: Path, key: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _checked(key: str, source: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigurationError(f"{source}: an API key must be printable ASCII without spaces, and not empty")
    return key
