#!/usr/bin/env bash
# Installs what is missing and builds what changed: system packages, Python environment, guest program, guest assets.
# It must leave alone whatever is already there.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

MINIMUM_RUST=1.85

# --- system packages ------------------------------------------------------------------------------------------------

packages=()
needs() { # command package…: remember the packages when the command is not there
    local command=$1
    shift
    command -v "$command" >/dev/null || packages+=("$@")
}
needs qemu-system-x86_64 qemu-system-x86
needs qemu-img qemu-utils
needs mmdebstrap mmdebstrap
needs nft nftables
needs ip iproute2
needs mke2fs e2fsprogs
needs zstd zstd
needs xz xz-utils
needs dpkg-deb dpkg
needs gcc gcc libc6-dev
needs curl curl ca-certificates
needs setpriv util-linux
# bindgen, which the ublk library runs at build time, loads it.
compgen -G "/usr/lib/llvm-*/lib/libclang.so*" >/dev/null || compgen -G "/usr/lib/*/libclang-[0-9]*.so*" >/dev/null ||
    [ -n "${LIBCLANG_PATH:-}" ] || packages+=(libclang1)
[ -e /usr/lib/x86_64-linux-gnu/libc.a ] || [ "$(uname -m)" != x86_64 ] || packages+=(libc6-dev)

python_of() { # first interpreter that is new enough
    local name
    for name in python3.13 python3.12 python3.11 python3; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
}
if [ -z "$(python_of)" ]; then
    if apt-cache show python3.11 >/dev/null 2>&1; then
        packages+=(python3.11 python3.11-venv)
    else
        packages+=(python3 python3-venv)
    fi
elif ! "$(python_of)" -c 'import ensurepip, venv' 2>/dev/null; then
    packages+=("$(basename "$(readlink -f "$(python_of)")")-venv")
fi

rust_is_new_enough() {
    command -v cargo >/dev/null &&
        [ "$(printf '%s\n' "$MINIMUM_RUST" "$(cargo --version | cut -d' ' -f2)" | sort -V | head -n1)" = "$MINIMUM_RUST" ]
}

if [ "${#packages[@]}" -gt 0 ] || ! rust_is_new_enough; then
    if ! command -v apt-get >/dev/null; then
        echo "missing: ${packages[*]} (and Rust $MINIMUM_RUST or newer); install them with this system's package manager" >&2
        exit 1
    fi
    step "system packages: ${packages[*]:-none}"
    "${AS_ROOT[@]}" apt-get update -qq
    if [ "${#packages[@]}" -gt 0 ]; then
        "${AS_ROOT[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
    fi
fi

# --- Rust -----------------------------------------------------------------------------------------------------------

install_rust() { # distribution packages first, rustup where they are too old
    local candidate
    for candidate in cargo-web,rustc-web cargo,rustc cargo-1.89,rustc-1.89 cargo-1.85,rustc-1.85; do
        local version
        version=$(apt-cache policy "${candidate%%,*}" 2>/dev/null | awk '/Candidate:/ { print $2 }')
        if [ -n "$version" ] && [ "$version" != "(none)" ] && dpkg --compare-versions "$version" ge "$MINIMUM_RUST"; then
            "${AS_ROOT[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ${candidate//,/ } >/dev/null
            return
        fi
    done
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal --no-modify-path
}
if ! rust_is_new_enough; then
    step "Rust"
    install_rust
    hash -r
    rust_is_new_enough || { echo "Rust $MINIMUM_RUST or newer is needed; see https://rustup.rs" >&2; exit 1; }
fi

# --- Python environment ---------------------------------------------------------------------------------------------

mkdir -p build "$CARGO_TARGET_DIR"
# Clones share the cache of compiled crates, and each build puts its result in the same place: build and copy as one.
build_lock="$CARGO_TARGET_DIR/.aenv.lock"

place() { # built mode destination: replace what differs by a new file, never the bytes that a process may have mapped
    if ! cmp -s "$1" "$3"; then
        install -m "$2" "$1" "$3.new"
        mv "$3.new" "$3"
    fi
}

stamp=.venv/.stamp
wanted=$(cat pyproject.toml requirements.lock scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ ! -x .venv/bin/aenv ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    step "Python environment (.venv)"
    [ -x .venv/bin/python ] || "$(python_of)" -m venv .venv
    rm -f "$NATIVE_MODULE" # pip would write over it
    flock "$build_lock" .venv/bin/python -m pip install -q --disable-pip-version-check -c requirements.lock -e '.[dev]'
    echo "$wanted" >"$stamp"
fi

# --- Rust programs and the Python extension -------------------------------------------------------------------------

step "guest program, block daemon, Python extension (cargo build)"
(
    flock 9
    # The programs are static: one runs in any guest, the other is copied into the assets.
    CARGO_TERM_PROGRESS_WHEN=auto RUSTFLAGS="-C target-feature=+crt-static" \
        cargo build --release --locked -p aenv-guest -p aenv-blockd --target "$GUEST_TARGET"
    place "$CARGO_TARGET_DIR/$GUEST_TARGET/release/aenv-guest" 0755 "$GUEST_BINARY"
    place "$CARGO_TARGET_DIR/$GUEST_TARGET/release/aenv-blockd" 0755 "$BLOCKD_BINARY"
    cargo build --release --locked -p agentenv-native
    place "$CARGO_TARGET_DIR/release/libagentenv_native.so" 0755 "$NATIVE_MODULE"
) 9>"$build_lock"

# --- guest assets and the base template -----------------------------------------------------------------------------

step "guest assets and the base template"
"${AS_ROOT[@]}" .venv/bin/aenv assets build --guest-binary "$GUEST_BINARY"
