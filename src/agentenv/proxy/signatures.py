"""Which sandbox a signed file URL belongs to: the one whose token made its signature (E2B contract §3.6).

It finds the sandbox and nothing more. The guest agent verifies the signature again and is the one that
judges expiry.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import parse_qsl

from agentenv.orchestrator.routes import Route, Sleeper

_PREFIX = b"v1_"
_LENGTH = len(_PREFIX) + 43


def sign(path: bytes, operation: str, username: bytes, token: str, expiration: bytes | None = None) -> bytes:
    """Make a signature: `v1_` and the unpadded base64 of SHA-256 over the colon-joined parts."""
    parts = [path, operation.encode(), username, token.encode()]
    if expiration is not None:
        parts.append(expiration)
    return _PREFIX + base64.b64encode(hashlib.sha256(b":".join(parts)).digest()).rstrip(b"=")


Signer = TypeVar("Signer", Route, Sleeper)


def find_signer(routes: Iterable[Signer], operations: tuple[str, ...], query: bytes) -> Signer | None:
    """The route, or sleeper, whose token verifies the signature in `query`, or None.

    Every route is compared, each in constant time, so that the time taken says nothing about where a match lies.
    """
    parameters: dict[bytes, bytes] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        parameters.setdefault(key, value)
    signature = parameters.get(b"signature", b"")
    if len(signature) != _LENGTH or not signature.startswith(_PREFIX):
        return None
    path, username = parameters.get(b"path", b""), parameters.get(b"username", b"")
    expiration = parameters.get(b"signature_expiration")
    found: Signer | None = None
    for route in routes:
        if not route.envd_access_token:
            continue
        for operation in operations:
            expected = sign(path, operation, username, route.envd_access_token, expiration)
            if hmac.compare_digest(expected, signature):
                found = route
    return found
