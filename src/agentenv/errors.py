"""The one tree of errors: each has an HTTP status and a message that says what failed and what to do about it.

Nothing here knows about HTTP frameworks; `api` and `proxy` turn these into responses. A library's own error never
reaches a client: whoever calls the library wraps it in one of these.
"""

from __future__ import annotations

from typing import ClassVar


class AgentEnvError(Exception):
    """Base of every error that may reach a caller.

    Attributes:
        status: HTTP status that the API answers with.
        error_code: optional machine-readable word for the body (`error_code` in the E2B contract).
        retry_after_s: seconds for a `Retry-After` header, or None.
        should_retry: value for a `Should-Retry` header (E2B clients obey it), or None to send none.
    """

    status: ClassVar[int] = 500
    error_code: str | None = None
    retry_after_s: int | None = None
    should_retry: bool | None = None

    def __init__(
        self,
        message: str,
        *,
        error_code: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if error_code is not None:
            self.error_code = error_code
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s
        if should_retry is not None:
            self.should_retry = should_retry


class InvalidRequestError(AgentEnvError):
    """The request itself is wrong; sending it again will not help."""

    status = 400


class AuthenticationError(AgentEnvError):
    """No API key, or not one of ours."""

    status = 401


class ForbiddenError(AgentEnvError):
    """The caller is known, but may not do this."""

    status = 403


class NotFoundError(AgentEnvError):
    """The named object does not exist, or is not the caller's."""

    status = 404


class SandboxNotFoundError(NotFoundError):
    """No sandbox of that id."""

    def __init__(self, sandbox_id: str) -> None:
        super().__init__(f"Sandbox \"{sandbox_id}\" doesn't exist or you don't have access to it")


class TemplateNotFoundError(NotFoundError):
    """No template of that name."""

    def __init__(self, template: str) -> None:
        super().__init__(f"template '{template}' not found")


class ConflictError(AgentEnvError):
    """The object is in a state (or in a transition) that does not allow the call."""

    status = 409


class PayloadTooLargeError(AgentEnvError):
    """A request body larger than the endpoint takes."""

    status = 413


class IdempotencyMismatchError(AgentEnvError):
    """An `Idempotency-Key` was used again with another body."""

    status = 422
    error_code = "idempotency_request_mismatch"


class TooManyRequestsError(AgentEnvError):
    """A limit of this node is reached; trying again later helps."""

    status = 429
    retry_after_s = 1


class NotImplementedYetError(AgentEnvError):
    """The call is part of the E2B API, but this version does not offer it."""

    status = 501
    should_retry = False


class CapacityError(AgentEnvError):
    """The node has no room (memory, slots) for what was asked."""

    status = 503
    error_code = "sandbox_capacity_unavailable"
    retry_after_s = 2


class InsufficientStorageError(AgentEnvError):
    """A disk of this node is full."""

    status = 507
    should_retry = False


class ConfigurationError(AgentEnvError):
    """The configuration or the host lacks something; the message names it and the command that mends it."""


class AssetError(AgentEnvError):
    """A guest asset (kernel, initramfs, root file system) is missing, damaged, or could not be made."""


class VmmError(AgentEnvError):
    """The virtual machine monitor failed or answered with an error."""


class SnapshotError(AgentEnvError):
    """A snapshot is damaged, incomplete, or not of this version or host; the message names the file and the part."""


class SnapshotNotFoundError(NotFoundError):
    """No snapshot of that id."""

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"snapshot '{snapshot_id}' not found")


class SnapshotMismatchError(ConflictError):
    """This node cannot run a snapshot; the message names what does not match."""

    should_retry = False


class NetworkError(AgentEnvError):
    """A network slot could not be made, changed or removed."""


class StorageError(AgentEnvError):
    """A disk could not be made, opened or removed."""


class LayerError(StorageError):
    """A layer is missing, damaged, of a kind that this version does not read, or beyond a limit."""


class BlockDaemonError(StorageError):
    """The block daemon refused a request, or could not be asked.

    Attributes:
        code: the daemon's word for it (docs/blockd.md), or `unavailable` when no answer came: then what was asked may
            or may not have been done.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class GuestAgentError(AgentEnvError):
    """The agent inside the guest did not answer, or answered with an error."""


class GuestUnresponsiveError(GuestAgentError):
    """The agent is silent, and what was asked needs it; the sandbox goes on as it was."""

    status = 503
    error_code = "sandbox_guest_agent_unresponsive"
    retry_after_s = 5


class SandboxStartError(AgentEnvError):
    """A sandbox could not be started; everything taken for it was released."""

    error_code = "sandbox_create_failed"
    should_retry = False
