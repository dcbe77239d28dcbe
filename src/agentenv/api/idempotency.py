"""Idempotency keys of create calls: their form, and the digest that tells one request body from another.

What happens when a key comes again is the orchestrator's to decide (E2B contract §2.2.1).
"""

from __future__ import annotations

import hashlib
import json
import re

from pydantic import BaseModel

from agentenv.errors import InvalidRequestError

_KEY = re.compile(r"[a-z0-9-]{1,255}")


def check_idempotency_key(key: str | None) -> str | None:
    """Return the key as given.

    Raises:
        InvalidRequestError: it is not 1 to 255 characters of [a-z0-9-].
    """
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidRequestError("Idempotency-Key must be 1 to 255 characters of [a-z0-9-]")
    return key


def request_digest(body: BaseModel, timeout_s: int) -> str:
    """Return the sha256 (hex) of what a create request means.

    Order of keys, white space, unknown fields, and null for absent make no difference.
    `timeout_s` is the effective timeout.
    """
    content = body.model_dump(mode="json", exclude_defaults=True)
    content["timeout"] = timeout_s
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
