# Sourced by the other scripts: where things are, and how to become root when a step needs it.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.."

AENV_CACHE="${AENV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/aenv}"
export AENV_CACHE
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$AENV_CACHE/cargo-target}"
export PATH="$HOME/.cargo/bin:$PATH:/usr/sbin:/sbin"

GUEST_TARGET="$(uname -m)-unknown-linux-gnu"
GUEST_BINARY="build/aenv-guest"

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo --preserve-env=AENV_HOME,AENV_CACHE,AENV_CONFIG,AENV_API_KEY,PATH "$@"
    else
        echo "this step needs root, and there is no sudo: $*" >&2
        return 1
    fi
}

step() { printf '\033[1m==> %s\033[0m\n' "$*"; }
