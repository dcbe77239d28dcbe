"""Settings: precedence, errors that name the setting, and a page of documentation that matches the model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from agentenv.config import load_settings
from agentenv.errors import ConfigurationError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AENV_CONFIG", "AENV_API_KEY", "AENV_SANDBOX__VCPUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    return tmp_path


def test_environment_beats_file_beats_default(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_home / "config.toml").write_text("[sandbox]\nvcpus = 3\nmemory_mib = 777\n")
    monkeypatch.setenv("AENV_SANDBOX__VCPUS", "5")
    settings = load_settings()
    assert settings.home == own_home
    assert (settings.sandbox.vcpus, settings.sandbox.memory_mib, settings.sandbox.default_timeout_s) == (5, 777, 300)


def test_named_file_beats_the_one_at_home(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_home / "config.toml").write_text("[sandbox]\nvcpus = 3\n")
    named = own_home / "other.toml"
    named.write_text('log_level = "debug"\n')
    monkeypatch.setenv("AENV_CONFIG", str(named))
    settings = load_settings()
    assert (settings.log_level, settings.sandbox.vcpus) == ("debug", 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[sandbox]\nvcpus = 0\n", "sandbox.vcpus"),
        ("[sandbox]\nunknown = 1\n", "sandbox.unknown"),
        ("nonsense", "TOML"),
        ("[network]\nslot_cidr = 'x'\n", "network.slot_cidr"),
    ],
)
def test_errors_name_the_setting(own_home: Path, content: str, words: str) -> None:
    (own_home / "config.toml").write_text(content)
    with pytest.raises(ConfigurationError, match=words):
        load_settings()


def test_missing_file_is_named(own_home: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent"):
        load_settings(own_home / "absent.toml")


def test_the_key_is_not_shown(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_API_KEY", "e2b_" + "a" * 40)
    assert "aaaa" not in repr(load_settings())


def test_documentation_is_up_to_date() -> None:
    page = runpy.run_path(str(REPOSITORY / "scripts" / "settings_doc.py"))["render"]()
    assert (REPOSITORY / "docs" / "settings.md").read_text() == page, "run .venv/bin/python scripts/settings_doc.py"
