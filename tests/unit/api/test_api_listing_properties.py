"""Properties of lists: every page order, every filter text (E2B contract §2.1.4, §2.2.3)."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import quote, urlencode

from api_fakes import NOW, make_sandbox
from hypothesis import given
from hypothesis import strategies as st

from agentenv.api.listing import Filters, Order, list_page, parse_metadata_filter, shown_state
from agentenv.errors import InvalidRequestError
from agentenv.orchestrator.model import Sandbox, SandboxState

sandbox_ids = st.text(alphabet="abc019", min_size=1, max_size=6)
sandboxes = st.dictionaries(sandbox_ids, st.tuples(st.integers(0, 4), st.sampled_from(SandboxState)), max_size=25).map(
    lambda rows: [
        make_sandbox(sandbox_id, state=state, started_at=NOW + timedelta(microseconds=offset))
        for sandbox_id, (offset, state) in rows.items()
    ]
)


def pages(rows: list[Sandbox], order: Order, limit: int) -> list[Sandbox]:
    seen: list[Sandbox] = []
    token = None
    while True:
        page = list_page(rows, Filters(), order=order, limit=limit, token=token)
        assert len(page.items) <= limit
        seen += page.items
        token = page.next_token
        if token is None:
            return seen
        assert len(page.items) == limit


@given(sandboxes, st.integers(1, 7))
def test_pages_visit_each_once_and_asc_is_the_reverse(rows: list[Sandbox], limit: int) -> None:
    down = pages(rows, Order.DESC, limit)
    assert down == sorted((row for row in rows if shown_state(row)), key=lambda row: (NOW - row.started_at, row.id))
    assert pages(rows, Order.ASC, limit) == down[::-1]


@given(sandboxes, st.integers(1, 5))
def test_a_page_token_outlives_its_sandbox(rows: list[Sandbox], limit: int) -> None:
    page = list_page(rows, Filters(), limit=limit)
    if page.next_token is None:
        return
    left = [row for row in rows if row is not page.items[-1]]
    following = list_page(left, Filters(), token=page.next_token)
    assert [*page.items, *following.items] == list(list_page(rows, Filters()).items)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8"))))
def test_metadata_filters_survive_their_encoding(metadata: dict[str, str]) -> None:
    # As the SDKs do it: quote each part, then form-encode the map; the HTTP layer's own encoding is undone before us.
    text = urlencode({quote(key, safe=""): quote(value, safe="") for key, value in metadata.items()})
    assert parse_metadata_filter(text) == metadata


@given(st.text())
def test_any_filter_text_is_read_or_refused(text: str) -> None:
    try:
        parse_metadata_filter(text)
    except InvalidRequestError as error:
        assert error.status == 400
