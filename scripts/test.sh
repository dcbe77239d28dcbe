#!/usr/bin/env bash
# All tests: Rust, then Python (unit, end to end with real VMs, conformance with the official SDKs). With arguments:
# of the Python tests those that pytest finds with them.
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
if [ $# -gt 0 ]; then
    step "Python tests: $*"
    "${AS_ROOT[@]}" .venv/bin/python -m pytest "$@"
    exit
fi
# Guests wait more than they compute, so what needs none runs beside them. Shells let what is in the background ignore
# interrupts, and so would all programs that the tests start.
UNIT_LOG="$(mktemp)"
"${AS_ROOT[@]}" env --default-signal=INT .venv/bin/python -m pytest tests/unit >"$UNIT_LOG" 2>&1 &
UNIT_TESTS=$!
trap 'kill "$UNIT_TESTS" 2>/dev/null || true; rm -f "$UNIT_LOG"' EXIT
step "Python tests: clients, real VMs, the lab (beside them the unit tests)"
FAILED=0
"${AS_ROOT[@]}" .venv/bin/python -m pytest tests/conformance tests/e2e tests/lab || FAILED=$?
step "Python tests: units"
wait "$UNIT_TESTS" || FAILED=$?
cat "$UNIT_LOG"
exit "$FAILED"
