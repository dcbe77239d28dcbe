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
if [ ! -x /bin/busybox ] && command -v apt-get >/dev/null; then
    step "BusyBox, as the root file system of a guest"
    "${AS_ROOT[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends busybox-static \
        >/dev/null || echo "not installed: the tests that need it are skipped" >&2
fi
step "Python tests"
"${AS_ROOT[@]}" .venv/bin/python -m pytest "$@"
