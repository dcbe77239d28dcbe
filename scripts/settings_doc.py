"""Writes docs/settings.md from the settings model, so that the two cannot differ (a unit test compares them)."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentenv.config import Settings

TARGET = Path(__file__).resolve().parents[1] / "docs" / "settings.md"


def _default(name: str, field: FieldInfo) -> str:
    if name == "home":
        return "`/var/lib/aenv` (root), `~/.local/share/aenv`"
    value = field.get_default(call_default_factory=True)
    if value is None or value == ():
        return "none"
    return f"`{value}`"


def _rows(model: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        variable = f"AENV_{prefix.upper()}__{name.upper()}" if prefix else f"AENV_{name.upper()}"
        rows.append(
            f"| `{name}` | `{variable}` | {_default(name, field)} | {' '.join((field.description or '').split())} |"
        )
    return rows


def render() -> str:
    """The whole page."""
    head = ["| setting | variable | default | meaning |", "| --- | --- | --- | --- |"]
    lines = [
        "# Settings",
        "",
        "Made from `src/agentenv/config.py` by `scripts/settings_doc.py`; change it there.",
        "",
        "Environment variables win over the TOML file (`AENV_CONFIG`, else `$AENV_HOME/config.toml`), which wins over",
        "the defaults. Lists are JSON in variables. An unknown setting is an error.",
        "",
        "## At the top",
        "",
        *head,
        *_rows(Settings, ""),
    ]
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            doc = (section.__doc__ or "").strip()
            lines += ["", f"## `[{name}]`", "", doc, "", *head, *_rows(section, name)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render())
