#!/usr/bin/env bash
# The tests that run inside an emulated host with real ublk, kernel NBD and KVM (tests/lab); arguments go to pytest.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

"${AS_ROOT[@]}" .venv/bin/python -m pytest tests/lab "$@"
