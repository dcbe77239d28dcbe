#!/usr/bin/env bash
# Runs the benchmarks, or those that are named (`scripts/bench.sh storage`); each replaces its own section of
# bench/RESULTS.md.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

step "programs for the load (cargo build)"
cargo build --release --locked -p aenv-blockd -p overlaybd --example nbd_load --example lookup
for program in nbd_load lookup; do
    install -D "$CARGO_TARGET_DIR/release/examples/$program" "build/bench/$program"
done

benches=("${@/#/bench/}")
benches=("${benches[@]/%/.py}")
[ $# -gt 0 ] || benches=(bench/*.py)
for bench in "${benches[@]}"; do
    step "$bench"
    "${AS_ROOT[@]}" .venv/bin/python "$bench"
done
