# Sourced by the other scripts: where things are, and how to become root when a step needs it.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.."

AENV_CACHE="${AENV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/aenv}"
export AENV_CACHE
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$AENV_CACHE/cargo-target}"
export PATH="$HOME/.cargo/bin:$PATH:/usr/sbin:/sbin"

GUEST_TARGET="$(uname -m)-unknown-linux-gnu"
GUEST_BINARY="build/aenv-guest"
# shellcheck disable=SC2034  # for the scripts that source this
BLOCKD_BINARY="build/aenv-blockd"
NATIVE_MODULE="src/agentenv/_native.abi3.so"

# How to become root, as words in front of a command, so that a command in the background keeps its own pid.
AS_ROOT=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "this needs root for system packages and network namespaces, and there is no sudo" >&2
        exit 1
    fi
    AS_ROOT=(sudo "--preserve-env=AENV_HOME,AENV_CACHE,AENV_CONFIG,AENV_API_KEY,CI,PATH")
fi

step() { printf '\033[1m==> %s\033[0m\n' "$*"; }
