"""Which layers are merged: never the base's, enough of them, and each byte a logarithmic number of times."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from agentenv.storage.compaction import Run, choose_run


def test_a_chain_that_is_not_deep_is_left_alone() -> None:
    assert choose_run([], 0, 16) is None
    assert choose_run([9] * 16, 1, 16) is None
    assert choose_run([9] * 40, 40, 16) is None


def test_the_newest_are_merged_and_large_old_ones_left() -> None:
    assert choose_run([1000, *[1] * 16], 1, 16) == Run(1, 16)
    assert choose_run([1000, 500, 400, *[1] * 14], 1, 16) == Run(3, 14)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(0, 30), st.integers(2, 40))
def test_a_run_is_the_top_of_the_disks_own_layers(sizes: list[int], base: int, limit: int) -> None:
    base = min(base, len(sizes))
    run = choose_run(sizes, base, limit)
    if run is None:
        assert len(sizes) - base <= max(limit - base, limit // 2, 2)
        return
    assert run.first >= base
    assert run.first + run.count == len(sizes)
    assert run.count >= 2
    left = len(sizes) - run.count + 1
    assert left <= max(limit, base + max(limit // 2, 2))


@given(st.integers(12, 20), st.integers(50, 300))
def test_every_byte_is_rewritten_a_logarithmic_number_of_times(limit: int, captures: int) -> None:
    sizes, written = [10_000], 0
    for _ in range(captures):
        sizes.append(1)
        run = choose_run(sizes, 1, limit)
        if run is not None:
            merged = sum(sizes[run.first :])
            written += merged
            sizes = [*sizes[: run.first], merged]
        assert len(sizes) <= max(limit, 1 + max(limit // 2, 2))
    assert sum(sizes) == 10_000 + captures
    assert written <= captures * (2 * math.log2(captures) + 4)
