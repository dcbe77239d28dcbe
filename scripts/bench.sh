#!/usr/bin/env bash
# Runs the benchmarks; each replaces its own section of bench/RESULTS.md.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

for bench in bench/*.py; do
    step "$bench"
    "${AS_ROOT[@]}" .venv/bin/python "$bench"
done
