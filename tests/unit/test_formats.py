"""How values are written: lined up, never a zero for what is not one."""

from __future__ import annotations

import pytest

from fsdp2prof.reporters.formats import (
    bytes_column,
    mean_count,
    ms_column,
    scaled,
    show_frac,
    show_ns,
    signed,
)
from fsdp2prof.units import format_bytes, format_ns


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (1, "<0.01"),
        (-1, ">-0.01"),
        (4_999, "<0.01"),
        (5_001, "0.01"),
        (1_234_567_890, "1,234.57"),
        (-1_500_000, "-1.50"),
    ],
)
def test_nanoseconds_in_milliseconds_with_two_decimals(value: int | None, text: str) -> None:
    assert scaled(value, 10**6, 2) == text


def test_a_column_has_one_unit_and_as_many_decimals_as_its_largest_value_asks_for() -> None:
    times = ms_column("t_ns", "t", [9_000_000, None, -5])
    assert [times.text(value) for value in (9_000_000, None, 1_500_000)] == ["9.000", "-", "1.500"]
    sizes = bytes_column("b_bytes", "b", [3 << 30, 1 << 20])
    assert sizes.label == "b\nGiB"
    assert [sizes.text(value) for value in (3 << 30, 1 << 20)] == ["3.000", "0.001"]


def test_text_in_a_column_of_numbers_stands_as_it_is() -> None:
    assert ms_column("t_ns", "t", [1]).text("12.5 %") == "12.5 %"


def test_changes_carry_their_sign() -> None:
    assert [signed(show_ns)(value) for value in (1500, 0, -1500, None)] == [
        "+1.50 us",
        "0 ns",
        "-1.50 us",
        "-",
    ]
    assert [mean_count(value) for value in (3.0, 1.25, None)] == ["3", "1.2", "-"]
    assert show_frac(None) == "-"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1 << 20) - 8, "1.00 MiB"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        ((1 << 30) - (1 << 14), "1.00 GiB"),
        (-(1 << 20), "-1.00 MiB"),
        (1023 * 1024, "1023.0 KiB"),
    ],
)
def test_no_size_is_told_as_1024_of_the_smaller_unit(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(999_999, "1.00 ms"), (999, "999 ns"), (999_940, "999.9 us"), (10**9, "1.00 s")]
)
def test_no_time_is_told_as_1000_of_the_smaller_unit(value: int, text: str) -> None:
    assert format_ns(value) == text
