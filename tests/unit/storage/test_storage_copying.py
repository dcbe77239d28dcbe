"""Copies of large files: equal, with the holes of the original."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.storage.copying import copy_sparse

MIB = 1024 * 1024
pieces = st.lists(st.tuples(st.integers(0, 3 * MIB), st.binary(min_size=1, max_size=9000)), max_size=8)


@pytest.mark.parametrize("kernel_copies", [True, False])
@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 4 * MIB), written=pieces)
def test_a_sparse_copy_is_equal_and_keeps_holes(
    kernel_copies: bool, size: int, written: list[tuple[int, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        if not kernel_copies:

            def refuse(*_: object, **__: object) -> int:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

            patch.setattr(os, "copy_file_range", refuse)
        source, copy = Path(name, "source"), Path(name, "copy")
        with source.open("wb") as file:
            file.truncate(size)
            for offset, data in written:
                file.seek(offset)
                file.write(data)
        with source.open("rb") as original, copy.open("wb") as target:
            copied = copy_sparse(original.fileno(), target.fileno())
        assert copy.read_bytes() == source.read_bytes()
        assert copied <= source.stat().st_size
        if not written:
            assert copied == 0
