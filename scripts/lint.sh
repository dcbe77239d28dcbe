#!/usr/bin/env bash
# Static checks of everything; fails on the first finding.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
if cargo fmt --version >/dev/null 2>&1; then cargo fmt --check; else echo "rustfmt is not installed: skipped"; fi
if cargo clippy --version >/dev/null 2>&1; then
    cargo clippy --locked --quiet --workspace --all-targets -- -D warnings
else
    echo "clippy is not installed: skipped"
fi
