"""E2B's `AsyncSandbox` with what AgentENV can do beyond it; all else is inherited and works as it is documented there.

Errors are E2B's: `SandboxException` and its kin, with the server's message.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Self, Unpack, cast
from urllib.parse import quote

import e2b
import httpx
from e2b.api import api_exception_from_code, handle_api_exception
from e2b.api.client_async import get_api_client
from e2b.connection_config import ApiParams, ConnectionConfig
from e2b.exceptions import NotFoundException
from packaging.version import Version

from agentenv.client.snapshots import Snapshot, SnapshotNode, snapshot_from, trees_from

JSON_LINES = "application/x-ndjson"


class AsyncSandbox(e2b.AsyncSandbox):
    """A sandbox of an AgentENV server."""

    @classmethod
    async def create_cold(
        cls,
        snapshot_id: str,
        *,
        timeout: int | None = None,
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        **opts: Unpack[ApiParams],
    ) -> Self:
        """Start a sandbox that boots from the disk of a snapshot, without its memory and its processes.

        Args:
            snapshot_id: a snapshot, or any template.
            timeout: seconds to live; None: the server's default.
            metadata: to find it by.
            envs: environment of all its processes.
            opts: connection options, as for `create`.
        """
        body: dict[str, Any] = {"templateID": snapshot_id, "memory": False}
        body |= {"metadata": dict(metadata or {}), "envVars": dict(envs or {})}
        if timeout is not None:
            body["timeout"] = timeout
        params = cls._resolve_api_params(**opts)
        return cls._of(await _call(params, "POST", "/v2/sandboxes", body), params)

    async def rollback(self, snapshot_id: str, **opts: Unpack[ApiParams]) -> None:
        """Put this running sandbox back to a snapshot that was taken of it: memory, processes and disk.

        Its id, tokens and remaining time stay. Commands that run are cut off; connections are made anew. The SDK says
        of a command that is cut off that the sandbox was killed or reached its end of life: that is not so here.

        Raises:
            TimeoutException: no answer within `request_timeout`. The server goes on with the roll back: wait, or ask
                with `get_info`, before you use the sandbox.
            NotFoundException: there is no such sandbox, or no such snapshot.
            SandboxException: it does not run (409), the snapshot is not one of its own (400), or it could not be
                loaded; then the message says what became of the sandbox.
        """
        path = f"/sandboxes/{self.sandbox_id}/rollback"
        await _call(self._params(opts), "POST", path, {"snapshotID": snapshot_id})

    async def fork_each(
        self, count: int, *, timeout: int | None = None, **opts: Unpack[ApiParams]
    ) -> AsyncGenerator[Self | Exception, None]:
        """Make up to 100 copies of this sandbox and yield each as soon as it is ready, or why it is not.

        Who leaves the iteration early (close it then) has no copies at all, unless the last was on its way already:
        metadata, which copies have of this sandbox, finds those. Copies are as this sandbox was created,
        `autoPause` included: then they are paused at the end of their time, and kept until somebody kills them.

        Args:
            count: how many.
            timeout: seconds that each runs; None: the server's default.
            opts: connection options; `request_timeout` limits the time that is spent waiting for the server, in all.
                What the caller does between two copies does not count.

        Raises:
            TimeoutException: the copies were not all there within `request_timeout`; the server ends those that were.
            NotFoundException: there is no such sandbox.
            SandboxException: it cannot be forked, or the connection broke amid the answer; of the latter, too, the
                server ends the copies, unless it died: then look for them with `list`.
        """
        body: dict[str, Any] = {"count": count}
        if timeout is not None:
            body["timeout"] = timeout
        params = self._params(opts)
        config = ConnectionConfig(**params)
        client = get_api_client(config).get_async_httpx_client()
        path, headers = f"/sandboxes/{self.sandbox_id}/fork", {"Accept": JSON_LINES}
        patience = _Patience(config.request_timeout)
        with _sdk_errors("POST", path):
            async with AsyncExitStack() as stack:
                async with patience.spent():
                    answer = await stack.enter_async_context(client.stream("POST", path, json=body, headers=headers))
                    if answer.status_code >= 300:
                        await answer.aread()
                        raise _exception(answer)
                lines = answer.aiter_lines()
                for told in range(count):
                    async with patience.spent():
                        line = await anext(lines, None)
                    if line is None:
                        raise e2b.SandboxException(f"POST {path}: the answer ended after {told} of {count} copies")
                    yield self._fork_result(json.loads(line), params)

    async def snapshot_tree(self, **opts: Unpack[ApiParams]) -> list[SnapshotNode]:
        """The snapshots that were taken of this sandbox, and what they descend from, as trees. Returns the roots."""
        return trees_from(await _call(self._params(opts), "GET", f"/snapshots/tree?sandboxID={self.sandbox_id}"))

    @classmethod
    async def all_snapshot_trees(cls, **opts: Unpack[ApiParams]) -> list[SnapshotNode]:
        """All snapshots of the server as trees. Returns the roots."""
        return trees_from(await _call(cls._resolve_api_params(**opts), "GET", "/snapshots/tree"))

    @classmethod
    async def get_snapshot(cls, snapshot_id: str, **opts: Unpack[ApiParams]) -> Snapshot:
        """One snapshot by its id, name or build id.

        Raises:
            InvalidArgumentException: `snapshot_id` is empty.
            NotFoundException: there is none.
        """
        if not snapshot_id.strip():
            raise e2b.InvalidArgumentException("snapshot_id is empty")
        path = f"/snapshots/{quote(snapshot_id, safe='')}"
        return snapshot_from(await _call(cls._resolve_api_params(**opts), "GET", path))

    def _params(self, opts: ApiParams) -> ApiParams:
        return cast(ApiParams, self.connection_config.get_api_params(**opts))

    @classmethod
    def _fork_result(cls, entry: Mapping[str, Any], params: ApiParams) -> Self | Exception:
        if "sandbox" in entry:
            return cls._of(entry["sandbox"], params)
        return api_exception_from_code(entry["error"]["code"], entry["error"]["message"])

    @classmethod
    def _of(cls, handle: Mapping[str, Any], params: ApiParams) -> Self:
        """The sandbox that the server has just made."""
        headers = {"E2b-Sandbox-Id": handle["sandboxID"], "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        token = handle.get("envdAccessToken")
        if token is not None:
            headers["X-Access-Token"] = token
        return cls(
            sandbox_id=handle["sandboxID"],
            sandbox_domain=handle.get("domain"),
            envd_version=Version(handle["envdVersion"]),
            envd_access_token=token,
            traffic_access_token=handle.get("trafficAccessToken"),
            connection_config=ConnectionConfig(extra_sandbox_headers=headers, **params),
        )


async def _call(params: ApiParams, method: str, path: str, body: object = None) -> Any:
    """Call the control plane as the SDK does: its key, its retries, its limits, its exceptions."""
    client = get_api_client(ConnectionConfig(**params)).get_async_httpx_client()
    with _sdk_errors(method, path):
        answer = await client.request(method, path, json=body)
        if answer.status_code >= 300:
            raise _exception(answer)
        return answer.json()


class _Patience:
    """How long several waits may take together, in seconds; None: any time."""

    def __init__(self, limit_s: float | None) -> None:
        self._left_s = limit_s

    @asynccontextmanager
    async def spent(self) -> AsyncIterator[None]:
        """One of the waits.

        Raises:
            TimeoutError: the time is over.
        """
        begun = time.monotonic()
        async with asyncio.timeout(self._left_s):
            yield
        if self._left_s is not None:
            self._left_s -= time.monotonic() - begun


@contextmanager
def _sdk_errors(method: str, path: str) -> Iterator[None]:
    """Let what goes wrong with a connection be an error of the SDK."""
    call = f"{method} {path}"
    try:
        yield
    except (httpx.TimeoutException, TimeoutError) as error:
        raise e2b.TimeoutException(f"{call}: no answer within the request timeout") from error
    except httpx.HTTPError as error:
        raise e2b.SandboxException(f"{call}: the connection to the server failed: {error}") from error
    except json.JSONDecodeError as error:
        raise e2b.SandboxException(f"{call}: the server does not answer like an AgentENV server") from error


def _exception(answer: httpx.Response) -> Exception:
    kind = NotFoundException if answer.status_code == httpx.codes.NOT_FOUND else e2b.SandboxException
    return cast(Exception, handle_api_exception(answer, default_exception_class=kind))
