"""Turns the orchestrator's data into response bodies. No decisions beyond what is shown and what is left out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC

from agentenv.api.errors import printable
from agentenv.api.listing import shown_state
from agentenv.api.models import (
    CollectedView,
    ForkError,
    ForkResult,
    LifecycleInfo,
    ListedSandbox,
    LogLine,
    Metric,
    NetworkInfo,
    SandboxHandle,
    SandboxInfo,
    SnapshotNodeView,
    SnapshotView,
    SpaceView,
    StructuredLog,
)
from agentenv.errors import AgentEnvError, SandboxNotFoundError
from agentenv.ids import CLIENT_ID
from agentenv.orchestrator.model import (
    CollectedSpace,
    LogEntry,
    MetricSample,
    NetworkOptions,
    Sandbox,
    SnapshotInfo,
    SnapshotNode,
    SpaceReport,
)


def handle_view(sandbox: Sandbox, domain: str) -> SandboxHandle:
    """Show what a client needs to reach the sandbox."""
    return SandboxHandle(
        template_id=sandbox.template_id,
        sandbox_id=sandbox.id,
        client_id=CLIENT_ID,
        envd_version=sandbox.envd_version,
        alias=sandbox.alias,
        envd_access_token=sandbox.envd_access_token,
        traffic_access_token=sandbox.traffic_access_token,
        domain=domain,
    )


def list_view(sandbox: Sandbox) -> ListedSandbox:
    """Show an item of a list.

    Raises:
        SandboxNotFoundError: clients do not see a sandbox in this state.
    """
    return ListedSandbox(
        template_id=sandbox.template_id,
        sandbox_id=sandbox.id,
        client_id=CLIENT_ID,
        alias=sandbox.alias,
        started_at=sandbox.started_at,
        end_at=sandbox.end_at,
        cpu_count=sandbox.vcpus,
        memory_mb=sandbox.memory_mib,
        disk_size_mb=sandbox.disk_mib,
        state=_state(sandbox),
        envd_version=sandbox.envd_version,
        metadata=dict(sandbox.request.metadata),
        envd_unresponsive_at_pause=True if sandbox.agent_unresponsive_at_pause else None,
    )


def info_view(sandbox: Sandbox, domain: str) -> SandboxInfo:
    """Show all about a sandbox.

    Raises:
        SandboxNotFoundError: clients do not see a sandbox in this state.
    """
    request = sandbox.request
    lifecycle = None
    if request.lifecycle_given:
        lifecycle = LifecycleInfo(on_timeout=request.on_timeout.value, auto_resume=request.auto_resume)
    return SandboxInfo(
        **dict(list_view(sandbox)),
        envd_access_token=sandbox.envd_access_token,
        domain=domain,
        allow_internet_access=request.allow_internet_access,
        network=_network_view(request.network),
        lifecycle=lifecycle,
        pause_mode=None if sandbox.pause_mode is None else sandbox.pause_mode.value,
        checkpoint_id=sandbox.checkpoint_id,
    )


def fork_view(result: Sandbox | AgentEnvError, domain: str) -> ForkResult:
    """Show one copy of a fork, or why there is none."""
    if isinstance(result, AgentEnvError):
        return ForkResult(error=ForkError(code=result.status, message=printable(result.message)))
    return ForkResult(sandbox=handle_view(result, domain))


def snapshot_view(snapshot: SnapshotInfo) -> SnapshotView:
    """Show a snapshot."""
    return SnapshotView(
        snapshot_id=snapshot.reference,
        names=list(snapshot.names),
        build_id=snapshot.id,
        template_id=snapshot.template_id,
        sandbox_id=snapshot.sandbox_id,
        parent_id=snapshot.parent_id,
        created_at=snapshot.created_at,
        mode=snapshot.kind.value,
        cpu_count=snapshot.vcpus,
        memory_mb=snapshot.memory_mib,
        disk_size_mb=snapshot.disk_mib,
        envd_version=snapshot.agent_version,
    )


def tree_view(roots: Iterable[SnapshotNode]) -> list[SnapshotNodeView]:
    """Show trees as one list, parents before their children: chains of snapshots are deeper than JSON may nest."""
    shown: list[SnapshotNodeView] = []
    waiting: list[tuple[str | None, SnapshotNode]] = [(None, root) for root in reversed(tuple(roots))]
    while waiting:
        parent_id, node = waiting.pop()
        shown.append(
            SnapshotNodeView(
                build_id=node.id,
                parent_id=parent_id,
                exclusive_bytes=node.exclusive_bytes,
                shared_bytes=node.shared_bytes,
                snapshot=None if node.snapshot is None else snapshot_view(node.snapshot),
            )
        )
        waiting.extend((node.id, child) for child in reversed(node.children))
    return shown


def space_view(report: SpaceReport) -> SpaceView:
    """Show what takes up the disk."""
    return SpaceView(
        layers_bytes=report.layers_bytes,
        garbage_bytes=report.garbage_bytes,
        templates_bytes=report.templates_bytes,
        snapshots_bytes=report.snapshots_bytes,
        paused_bytes=report.paused_bytes,
        disks_bytes=report.disks_bytes,
        budget_bytes=report.budget_bytes,
        free_bytes=report.free_bytes,
    )


def collected_view(collected: CollectedSpace) -> CollectedView:
    """Show what was removed."""
    return CollectedView(layers=collected.layers, bytes=collected.bytes)


def metric_view(sample: MetricSample) -> Metric:
    """Show one reading."""
    return Metric(
        timestamp=sample.timestamp,
        timestamp_unix=int(sample.timestamp.timestamp()),
        cpu_count=sample.cpu_count,
        cpu_used_pct=sample.cpu_used_pct,
        mem_used=sample.mem_used,
        mem_total=sample.mem_total,
        mem_cache=sample.mem_cache,
        disk_used=sample.disk_used,
        disk_total=sample.disk_total,
    )


def log_line_view(entry: LogEntry) -> LogLine:
    """Show a log entry as one JSON text. The CLI needs `level` and `logger` in it, as strings."""
    line = {
        **entry.fields,
        "timestamp": entry.timestamp.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "level": entry.level,
        "logger": entry.logger,
        "message": entry.message,
    }
    return LogLine(timestamp=entry.timestamp, line=json.dumps(line, separators=(",", ":")))


def log_view(entry: LogEntry) -> StructuredLog:
    """Show a log entry."""
    return StructuredLog(
        timestamp=entry.timestamp,
        message=entry.message,
        level=entry.level,
        fields={**entry.fields, "logger": entry.logger},
    )


def _state(sandbox: Sandbox) -> str:
    state = shown_state(sandbox)
    if state is None:
        raise SandboxNotFoundError(sandbox.id)
    return state


def _network_view(network: NetworkOptions | None) -> NetworkInfo | None:
    if network is None:
        return None
    return NetworkInfo(
        allow_public_traffic=network.allow_public_traffic,
        allow_out=list(network.allow_out) or None,
        deny_out=list(network.deny_out) or None,
        mask_request_host=network.mask_request_host,
        https_ports=list(network.https_ports) or None,
    )
