"""Identifiers and secrets: how they are made, and what form is accepted from clients."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import uuid

from agentenv.errors import InvalidRequestError

_ID_ALPHABET = string.ascii_lowercase + string.digits
_SANDBOX_ID = re.compile(r"[a-z0-9]{1,57}")
_LEGACY_SANDBOX_ID = re.compile(r"([a-z0-9]{1,57})-[a-z0-9]{1,57}")

CLIENT_ID = "agentenv"
"""Value of the legacy `clientID` field, which must be a non-empty string."""


def new_sandbox_id() -> str:
    """Make a sandbox id: `i` and 19 characters of [a-z0-9], so that it is always a valid DNS label part."""
    return "i" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(19))


def is_sandbox_id(text: str) -> bool:
    """Whether a text is a sandbox id in its canonical form."""
    return _SANDBOX_ID.fullmatch(text) is not None


def parse_sandbox_id(text: str) -> str:
    """Return the canonical sandbox id of what a client sent.

    Old clients append `-<clientID>`; one such suffix is accepted and dropped.

    Raises:
        InvalidRequestError: the text cannot be a sandbox id.
    """
    if _SANDBOX_ID.fullmatch(text):
        return text
    legacy = _LEGACY_SANDBOX_ID.fullmatch(text)
    if legacy:
        return legacy.group(1)
    raise InvalidRequestError("Invalid sandbox ID")


def new_template_id() -> str:
    """Make a template id: `t` and 19 characters of [a-z0-9]."""
    return "t" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(19))


def template_id_for(alias: str) -> str:
    """The template id that goes with an alias: always the same one, so that whoever names a template need not ask."""
    number = int.from_bytes(hashlib.sha256(alias.encode()).digest())
    digits = []
    for _ in range(19):
        number, digit = divmod(number, len(_ID_ALPHABET))
        digits.append(_ID_ALPHABET[digit])
    return "t" + "".join(digits)


def new_api_key() -> str:
    """Make an API key: `e2b_` and 40 hex digits (older SDKs check this form)."""
    return "e2b_" + secrets.token_hex(20)


def new_token() -> str:
    """Make a secret token (128 bits or more) that is safe in headers and URLs."""
    return secrets.token_hex(32)


def new_uuid() -> str:
    """Make a random UUID in text form."""
    return str(uuid.uuid4())


def secrets_equal(left: str, right: str) -> bool:
    """Compare two secrets in constant time. Accepts any text."""
    return hmac.compare_digest(left.encode("utf-8", "surrogateescape"), right.encode("utf-8", "surrogateescape"))
