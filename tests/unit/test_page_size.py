"""A page of a large job stays one that a browser opens at once."""

from __future__ import annotations

import pytest
from support.large_run import KINDS, LAYERS, large_run

from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions


@pytest.mark.parametrize(
    ("ranks", "most"), [(64, 6_000_000), pytest.param(1024, 8_000_000, marks=pytest.mark.slow)]
)
def test_a_page_of_many_ranks_and_128_layers_stays_small(ranks: int, most: int) -> None:
    page = RENDERERS["html"].render(build(large_run(ranks)), RenderOptions(source="runs/large"))
    assert isinstance(page, str)
    assert len(page.encode()) < most
    assert f"all {len(LAYERS) * len(KINDS)} rows" in page, "each layer's collectives are there"
