"""The official Python SDK: files, watching, signed URLs."""

from __future__ import annotations

import io
import os
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid

import pytest
from e2b import (
    FileType,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
)

pytestmark = pytest.mark.vm


@pytest.fixture
def folder(sandbox: Sandbox) -> str:
    path = f"/home/user/{uuid.uuid4().hex}"
    assert sandbox.files.make_dir(path) is True
    return path


def test_write_and_read(sandbox: Sandbox, folder: str) -> None:
    info = sandbox.files.write(f"{folder}/deep/er/file.txt", "héllo\n")
    assert info.path == f"{folder}/deep/er/file.txt"
    assert sandbox.files.read(f"{folder}/deep/er/file.txt") == "héllo\n"
    owner = sandbox.commands.run(f"stat -c '%U %G %a' {folder}/deep {folder}/deep/er/file.txt").stdout.splitlines()
    assert owner == ["user user 755", "user user 644"]


def test_binary_with_nul(sandbox: Sandbox, folder: str) -> None:
    content = bytes(range(256)) * 4096
    sandbox.files.write(f"{folder}/binary", content)
    assert bytes(sandbox.files.read(f"{folder}/binary", format="bytes")) == content
    streamed = b"".join(sandbox.files.read(f"{folder}/binary", format="stream"))
    assert streamed == content


def test_relative_and_home_paths(sandbox: Sandbox) -> None:
    sandbox.files.write("relative.txt", "1")
    sandbox.files.write("~/tilde.txt", "2")
    assert sandbox.files.read("/home/user/relative.txt") == "1"
    assert sandbox.files.read("/home/user/tilde.txt") == "2"
    sandbox.files.write("of-root.txt", "3", user="root")
    assert sandbox.files.read("/root/of-root.txt", user="root") == "3"


def test_write_files_and_io(sandbox: Sandbox, folder: str) -> None:
    written = sandbox.files.write_files(
        [
            {"path": f"{folder}/a", "data": "text"},
            {"path": f"{folder}/sub/b", "data": b"bytes"},
            {"path": f"{folder}/c", "data": io.BytesIO(b"stream")},
        ]
    )
    assert [entry.path for entry in written] == [f"{folder}/a", f"{folder}/sub/b", f"{folder}/c"]
    assert sandbox.files.read(f"{folder}/c") == "stream"


def test_overwrite_truncates_and_empty_file(sandbox: Sandbox, folder: str) -> None:
    sandbox.files.write(f"{folder}/f", "a long text")
    sandbox.files.write(f"{folder}/f", "short")
    assert sandbox.files.read(f"{folder}/f") == "short"
    sandbox.files.write(f"{folder}/f", "")
    assert sandbox.files.read(f"{folder}/f") == ""


def test_missing_file_and_directory_as_file(sandbox: Sandbox, folder: str) -> None:
    with pytest.raises(NotFoundException):
        sandbox.files.read(f"{folder}/nothing")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.read(folder)
    with pytest.raises(InvalidArgumentException):
        sandbox.files.write(folder, "x")


def test_exists_info_rename_remove(sandbox: Sandbox, folder: str) -> None:
    sandbox.files.write(f"{folder}/old", "12345")
    assert sandbox.files.exists(f"{folder}/old") is True
    info = sandbox.files.get_info(f"{folder}/old")
    assert (info.name, info.type, info.size) == ("old", FileType.FILE, 5)
    assert (info.owner, info.group, info.permissions) == ("user", "user", "-rw-r--r--")
    moved = sandbox.files.rename(f"{folder}/old", f"{folder}/new/place")
    assert moved.path == f"{folder}/new/place"
    assert sandbox.files.exists(f"{folder}/old") is False
    with pytest.raises(NotFoundException):
        sandbox.files.rename(f"{folder}/old", f"{folder}/other")
    sandbox.files.remove(f"{folder}/new")
    assert sandbox.files.exists(f"{folder}/new/place") is False
    sandbox.files.remove(f"{folder}/new")


def test_list_and_depth(sandbox: Sandbox, folder: str) -> None:
    sandbox.files.write(f"{folder}/b/inner", "")
    sandbox.files.write(f"{folder}/a", "")
    sandbox.commands.run(f"ln -s b {folder}/link")
    assert [entry.name for entry in sandbox.files.list(folder)] == ["a", "b", "link"]
    deep = [entry.path for entry in sandbox.files.list(folder, depth=2)]
    assert deep == [f"{folder}/a", f"{folder}/b", f"{folder}/b/inner", f"{folder}/link"]
    link = sandbox.files.get_info(f"{folder}/link")
    assert link.symlink_target == f"{folder}/b"
    with pytest.raises(NotFoundException):
        sandbox.files.list(f"{folder}/missing")


def test_make_dir_twice(sandbox: Sandbox, folder: str) -> None:
    assert sandbox.files.make_dir(f"{folder}/x/y") is True
    assert sandbox.files.make_dir(f"{folder}/x/y") is False


def test_metadata(sandbox: Sandbox, folder: str) -> None:
    info = sandbox.files.write(f"{folder}/m", "x", metadata={"Purpose": "test"})
    assert info.metadata == {"purpose": "test"}
    assert sandbox.files.get_info(f"{folder}/m").metadata == {"purpose": "test"}
    sandbox.files.write(f"{folder}/m", "x")
    assert not sandbox.files.get_info(f"{folder}/m").metadata


def test_gzip_both_ways(sandbox: Sandbox, folder: str) -> None:
    text = "compressible " * 50_000
    sandbox.files.write(f"{folder}/z", text, gzip=True)
    assert sandbox.files.read(f"{folder}/z", gzip=True) == text


def test_watch(sandbox: Sandbox, folder: str) -> None:
    handle = sandbox.files.watch_dir(folder, recursive=True)
    sandbox.files.write(f"{folder}/new", "content")
    sandbox.files.make_dir(f"{folder}/sub")
    sandbox.files.write(f"{folder}/sub/nested", "x")
    sandbox.files.rename(f"{folder}/new", f"{folder}/renamed")
    sandbox.files.remove(f"{folder}/renamed")
    seen: list[tuple[str, str]] = []
    deadline = time.monotonic() + 60
    while ("renamed", "remove") not in seen and time.monotonic() < deadline:
        seen += [(event.name, event.type.value) for event in handle.get_new_events()]
    assert [kind for name, kind in seen if name == "new"] == ["create", "chmod", "write", "rename"]
    assert ("sub/nested", "create") in seen
    assert ("renamed", "create") in seen
    handle.stop()
    with pytest.raises(NotFoundException):
        sandbox.files.watch_dir(f"{folder}/missing")


def _fetch(url: str, sandbox: Sandbox, data: bytes | None = None, content_type: str = "") -> tuple[int, bytes]:
    headers = {"Content-Type": content_type} if content_type else {}
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_signed_urls(sandbox: Sandbox, folder: str) -> None:
    sandbox.files.write(f"{folder}/signed file", "by signature")
    url = sandbox.download_url(f"{folder}/signed file", user="user", use_signature_expiration=300)
    assert url.startswith(os.environ["E2B_SANDBOX_URL"])
    assert _fetch(url, sandbox) == (200, b"by signature")
    status, _ = _fetch(url.replace("signature=v1_", "signature=v1_x"), sandbox)
    assert status == 401
    other = urllib.parse.quote(f"{folder}/other")
    status, _ = _fetch(url.replace(urllib.parse.quote(f"{folder}/signed file", safe=""), other), sandbox)
    assert status in (401, 404)
    upload = sandbox.upload_url(f"{folder}/put", user="user", use_signature_expiration=300)
    status, _ = _fetch(upload, sandbox, b"uploaded", "application/octet-stream")
    assert status == 200
    assert sandbox.files.read(f"{folder}/put") == "uploaded"
    expired = sandbox.download_url(f"{folder}/put", user="user", use_signature_expiration=-10)
    assert _fetch(expired, sandbox)[0] == 401
