#!/usr/bin/env bash
# All tests: Rust, then Python (unit, end to end with real VMs, conformance with the official SDKs).
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

step "lint"
scripts/lint.sh
step "Rust tests"
cargo test --locked --quiet --workspace
step "conformance clients"
scripts/conformance-clients.sh
step "Python tests"
"${AS_ROOT[@]}" .venv/bin/python -m pytest "$@"
