"""Fifty creates at once: each gets 201, or 429 with Retry-After; what was made works; nothing stays behind."""

from __future__ import annotations

import threading
from collections import Counter
from email.message import Message

import pytest

from harness.leftovers import leftovers_of
from harness.server import RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(900)]

OF_A_SERVER = ("slot", "namespace", "block daemon", "socket")
"""What a running server has without any sandbox."""


def test_fifty_creates_at_once() -> None:
    config = "[sandbox]\nmemory_mib = 256\nvcpus = 1\nmax_concurrent_starts = 3\nmax_queued_starts = 30\n"
    with RunningServer(config=config) as server:
        answers: list[tuple[int, dict[str, object], Message]] = []

        def create() -> None:
            answers.append(server.api("POST", "/v2/sandboxes", {"templateID": "base", "timeout": 900}, timeout_s=800))

        threads = [threading.Thread(target=create) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        statuses = Counter(status for status, _, _ in answers)
        assert set(statuses) == {201, 429}
        assert statuses[201] >= 30
        for status, body, headers in answers:
            if status == 429:
                assert body["code"] == 429
                assert int(headers["Retry-After"]) >= 1
        made = {str(body["sandboxID"]) for status, body, _ in answers if status == 201}
        listed = {row["sandboxID"] for row in server.api("GET", "/v2/sandboxes")[1]}
        assert listed == made
        token = {str(body["sandboxID"]): str(body["envdAccessToken"]) for status, body, _ in answers if status == 201}
        for sandbox_id in made:
            headers = {
                "E2b-Sandbox-Id": sandbox_id,
                "E2b-Sandbox-Port": "49983",
                "X-Access-Token": token[sandbox_id],
            }
            status, environment, _ = server.api("GET", "/envs", headers=headers)
            assert status == 200
            assert environment["E2B_SANDBOX_ID"] == sandbox_id

        def kill(sandbox_id: str) -> None:
            assert server.api("DELETE", f"/sandboxes/{sandbox_id}")[0] == 204

        killers = [threading.Thread(target=kill, args=(sandbox_id,)) for sandbox_id in made]
        for thread in killers:
            thread.start()
        for thread in killers:
            thread.join()
        assert server.api("GET", "/v2/sandboxes")[1] == []
        assert [line for line in leftovers_of(server.home) if not line.startswith(OF_A_SERVER)] == []
    assert leftovers_of(server.home) == []
