"""How the unknowns of a memory estimate combine to one range."""

from __future__ import annotations

import pytest

from fsdp2prof.estimators.config.shares import range_end
from fsdp2prof.estimators.verdict.memory_range import (
    active_range,
    of_older_software,
    widest_first,
    with_prediction,
)

GIB = 1 << 30
MARGIN = "memory_of_experts"


def test_the_error_of_predictions_is_a_share_of_what_older_software_takes() -> None:
    """64 GiB now and 28 with older software: at least 28 GiB less the margin, not 64 less both."""
    now, before, in_use = 64 * GIB, 28 * GIB, 56 * GIB
    found = widest_first(
        with_prediction(of_older_software(now, {"before": before}, MARGIN), reserved=now, margin=MARGIN)
    )
    end = range_end(MARGIN)
    least = end.value if end.fast is None else end.fast
    assert now + sum(one.low_bytes for one in found) == pytest.approx(before * (1 - least), abs=1)
    assert now + sum(one.high_bytes for one in found) == pytest.approx(now * (1 + end.value), abs=1)
    used = active_range(in_use, now, found)
    assert used is not None
    assert used[0] == pytest.approx((in_use - (now - before)) * (1 - least), abs=2)
    assert used[1] == pytest.approx(in_use * (1 + end.value), abs=2)
