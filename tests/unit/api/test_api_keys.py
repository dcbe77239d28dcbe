"""The API key's file and its checks."""

from __future__ import annotations

import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog
from pydantic import SecretStr

from agentenv.api.keys import key_matches, load_or_create_api_key
from agentenv.config import Settings
from agentenv.errors import ConfigurationError


def settings(home: Path, key: str | None = None) -> Settings:
    return Settings(home=home, api_key=SecretStr(key) if key is not None else None)


def test_the_key_is_made_once(tmp_path: Path) -> None:
    first = load_or_create_api_key(settings(tmp_path / "home"))
    assert re.fullmatch(r"e2b_[0-9a-f]{40}", first)
    assert load_or_create_api_key(settings(tmp_path / "home")) == first
    secrets = tmp_path / "home" / "secrets"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert [(path.name, stat.S_IMODE(path.stat().st_mode)) for path in secrets.iterdir()] == [("api-key", 0o600)]


def test_servers_that_start_together_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = list(threads.map(lambda _: load_or_create_api_key(settings(tmp_path)), range(8)))
    assert len(set(keys)) == 1
    assert [path.name for path in (tmp_path / "secrets").iterdir()] == ["api-key"]


def test_the_configured_key_wins(tmp_path: Path) -> None:
    assert load_or_create_api_key(settings(tmp_path, "other")) == "other"
    assert list(tmp_path.iterdir()) == []


def test_a_file_open_to_others_is_reported(tmp_path: Path) -> None:
    path = settings(tmp_path).paths.api_key
    path.parent.mkdir()
    path.write_text("mine\n")
    path.chmod(0o644)
    with structlog.testing.capture_logs() as entries:
        assert load_or_create_api_key(settings(tmp_path)) == "mine"
    assert [entry["event"] for entry in entries] == ["api_key_file_is_open_to_others"]
    assert "mine" not in str(entries)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff\xfe", "schlüssel".encode(), b"a\nb"])
def test_unusable_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = settings(tmp_path).paths.api_key
    path.parent.mkdir()
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="api-key"):
        load_or_create_api_key(settings(tmp_path))


def test_a_directory_in_the_way_is_an_error_that_names_it(tmp_path: Path) -> None:
    settings(tmp_path).paths.api_key.mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="api-key"):
        load_or_create_api_key(settings(tmp_path))


@pytest.mark.parametrize("key", ["", "a b", "a\n", "ü"])
def test_unusable_configured_keys_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigurationError, match="api_key"):
        load_or_create_api_key(settings(tmp_path, key))


def test_any_text_can_be_compared() -> None:
    assert key_matches("key", "key")
    for other in ("", "kez", "keyy", "ü", "\udcff", "\0"):
        assert not key_matches(other, "key")
