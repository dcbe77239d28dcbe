"""The proxy's own answers: JSON for programs, a small page for browsers.

Statuses, texts and field names are those of the E2B contract's ingress table (§3.1): clients match substrings of them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

from agentenv.errors import AgentEnvError
from agentenv.proxy.target import header


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that does not come from a guest."""

    status: int
    message: str
    sandbox_id: str | None = None
    port: int | None = None

    @property
    def fields(self) -> dict[str, str | int]:
        """The JSON body. Optional fields are left out, never null."""
        body: dict[str, str | int] = {}
        if self.sandbox_id is not None:
            body["sandboxId"] = self.sandbox_id
        body["message"] = self.message
        if self.port is not None:
            body["port"] = self.port
        body["code"] = self.status
        return body

    def render(self, request_headers: Iterable[tuple[bytes, bytes]]) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body, in the form that the asking client reads."""
        if _is_browser(tuple(request_headers)):
            body, content_type = _page(self).encode(), b"text/html; charset=utf-8"
        else:
            body, content_type = json.dumps(self.fields).encode(), b"application/json"
        headers = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        ]
        return headers, body


def sandbox_not_found(sandbox_id: str) -> Reply:
    """Unknown, killed, or paused without auto-resume."""
    return Reply(502, "The sandbox was not found", sandbox_id)


def port_not_open(sandbox_id: str, port: int) -> Reply:
    """The sandbox runs, and nothing in it listens on the port."""
    return Reply(502, "The sandbox is running but port is not open", sandbox_id, port)


def not_woken(sandbox_id: str, error: AgentEnvError) -> Reply:
    """Paused, and the traffic would have woken it, but it could not be resumed."""
    if error.status == 404:  # killed meanwhile
        return sandbox_not_found(sandbox_id)
    return Reply(error.status if error.status in (409, 429, 503, 507) else 503, error.message, sandbox_id)


def bad_upstream(sandbox_id: str, port: int, what: str) -> Reply:
    """Something listens, but its answer is not usable HTTP."""
    return Reply(502, f"The sandbox is running but the service on the port {what}", sandbox_id, port)


def traffic_token_refused(sandbox_id: str, port: int) -> Reply:
    """Private ingress without the right token."""
    return Reply(
        403, "This sandbox takes no public traffic: send its token in E2B-Traffic-Access-Token", sandbox_id, port
    )


def private_path(sandbox_id: str) -> Reply:
    """A path of the agent that only the host may ask for."""
    return Reply(403, "This path is private to the sandbox's host", sandbox_id)


def _is_browser(headers: tuple[tuple[bytes, bytes], ...]) -> bool:
    accept, agent = header(headers, b"accept") or b"", header(headers, b"user-agent") or b""
    return b"text/html" in accept.lower() and agent.startswith((b"Mozilla/", b"Opera/"))


def _page(reply: Reply) -> str:
    try:
        phrase = HTTPStatus(reply.status).phrase
    except ValueError:
        phrase = "Error"
    rows = "".join(
        f"<tr><th>{label}</th><td><code>{html.escape(str(value))}</code></td></tr>"
        for label, value in (("Sandbox", reply.sandbox_id), ("Port", reply.port))
        if value is not None
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{reply.status} {phrase}</title><style>"
        "body{font:16px/1.5 system-ui,sans-serif;max-width:36rem;margin:15vh auto;padding:0 1rem}"
        "body{color:#222;background:#fff}"
        "th{text-align:left;padding-right:1rem;font-weight:500}"
        "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}}"
        f"</style></head><body><h1>{reply.status} {phrase}</h1><p>{html.escape(reply.message)}</p>"
        f"<table>{rows}</table></body></html>"
    )
