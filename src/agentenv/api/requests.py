"""Turns the body of a create call into the orchestrator's `CreateRequest`: every rule of E2B contract §2.2.1.

Wrong requests are refused first (400), then right ones that this version cannot fulfil (501): never a silent lie.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.api.idempotency import check_idempotency_key, request_digest
from agentenv.api.models import CreateBody
from agentenv.api.network_rules import check_network
from agentenv.api.params import check_timeout, normal_template_reference
from agentenv.errors import InvalidRequestError, NotImplementedYetError
from agentenv.orchestrator.model import CreateRequest, OnTimeout


def create_request(
    body: CreateBody, *, default_timeout_s: int, max_timeout_s: int, idempotency_key: str | None
) -> CreateRequest:
    """Validate a create call.

    Raises:
        InvalidRequestError: the request is wrong.
        NotImplementedYetError: the request asks for what this version does not offer.
    """
    key = check_idempotency_key(idempotency_key)
    template = normal_template_reference(body.template_id)
    timeout_s = default_timeout_s if body.timeout is None else body.timeout
    check_timeout(timeout_s, max_timeout_s)
    auto_resume = body.auto_resume is not None and body.auto_resume.enabled
    _check_lifecycle(body, auto_resume=auto_resume)
    _check_env_vars(body.env_vars or {})
    network = None
    if body.network is not None:
        network = check_network(body.network, allow_internet_access=body.allow_internet_access)
    _refuse_unsupported(body)
    return CreateRequest(
        template=template,
        timeout_s=timeout_s,
        metadata=dict(body.metadata or {}),
        env_vars=dict(body.env_vars or {}),
        on_timeout=OnTimeout.PAUSE if body.auto_pause else OnTimeout.KILL,
        auto_pause_memory=body.auto_pause_memory is not False,
        auto_resume=auto_resume,
        lifecycle_given=body.auto_pause is not None or body.auto_resume is not None,
        allow_internet_access=body.allow_internet_access,
        network=network,
        idempotency_key=key,
        request_digest=request_digest(body, timeout_s) if key is not None else None,
        memory=body.memory is not False,
    )


def _check_lifecycle(body: CreateBody, *, auto_resume: bool) -> None:
    if body.auto_pause_memory is False:
        if not body.auto_pause:
            raise InvalidRequestError("autoPauseMemory: false needs autoPause: true")
        if auto_resume:
            raise InvalidRequestError("autoPauseMemory: false and autoResume exclude each other")
    if auto_resume and not body.auto_pause:
        raise InvalidRequestError("autoResume needs autoPause: true")


def _check_env_vars(env_vars: Mapping[str, str]) -> None:
    for name, value in env_vars.items():
        if not name or "=" in name or "\0" in name:
            raise InvalidRequestError("envVars: a name must not be empty, nor contain '=' or NUL")
        if "\0" in value:
            raise InvalidRequestError(f"envVars: the value of '{name}' contains NUL")


def _refuse_unsupported(body: CreateBody) -> None:
    if body.mcp is not None:
        raise NotImplementedYetError("mcp: MCP servers in sandboxes are not supported yet")
    if body.iam is not None and body.iam.get("tokens") != {}:
        raise NotImplementedYetError("iam: workload identity tokens are not supported yet")
    if body.volume_mounts:
        raise NotImplementedYetError("volumeMounts: volumes are not supported yet")
