#!/usr/bin/env bash
# Starts a server on a free port, runs the quickstart with the official e2b package against it, and stops the server.
# The server has a home of its own that borrows the built assets, so that one that already runs is left alone.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "$0")/environment.sh"

scratch=$(mktemp -d)
ready=$scratch/ready
log=$scratch/server.log
mkfifo "$ready"
built=$("${AS_ROOT[@]}" .venv/bin/aenv home)
mkdir "$scratch/home"
export AENV_HOME=$scratch/home
"${AS_ROOT[@]}" .venv/bin/aenv assets link "$built"
"${AS_ROOT[@]}" .venv/bin/aenv serve --listen 127.0.0.1:0 --drain >"$ready" 2>"$log" &
server=$!
stop() {
    if kill -0 "$server" 2>/dev/null; then
        "${AS_ROOT[@]}" kill -TERM "$server" 2>/dev/null || true
        wait "$server" || true
    fi
    "${AS_ROOT[@]}" rm -rf "$scratch"
}
trap stop EXIT

step "starting the server"
exec 3<"$ready"
if ! read -r line <&3; then
    cat "$log" >&2
    exit 1
fi
echo "$line"
url=${line##* }

export E2B_API_URL=$url E2B_SANDBOX_URL=$url
E2B_API_KEY=${AENV_API_KEY:-$("${AS_ROOT[@]}" cat "$AENV_HOME/secrets/api-key")}
export E2B_API_KEY
step "examples/quickstart.py"
if ! .venv/bin/python examples/quickstart.py; then
    echo "the quickstart failed; the end of the server's log:" >&2
    tail -n 40 "$log" >&2
    exit 1
fi
step "stopping the server"
stop
trap - EXIT
echo "done. Next: .venv/bin/aenv serve, and see README.md"
