"""One browser for all tests of pages; they skip where none is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.chromium import Page, find_chromium


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    browser = find_chromium()
    if browser is None:
        pytest.skip("no Chromium is installed")
    with Page(browser) as opened:
        yield opened
