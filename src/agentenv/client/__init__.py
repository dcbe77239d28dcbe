"""What AgentENV can do and the E2B SDK has no call for: rolling back, the tree of snapshots, cold starts, large forks.

`AsyncSandbox` is the official one with some methods more. Needs the package `e2b`: `pip install 'agentenv[client]'`.
Servers are found as the SDK finds them, by `E2B_API_URL`, `E2B_SANDBOX_URL` and `E2B_API_KEY`.
"""

try:
    import e2b as _e2b  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "agentenv.client needs the package e2b: pip install 'agentenv[client]'", name=error.name
    ) from error

from agentenv.client.sandbox import AsyncSandbox
from agentenv.client.snapshots import Snapshot, SnapshotNode

__all__ = ["AsyncSandbox", "Snapshot", "SnapshotNode"]
