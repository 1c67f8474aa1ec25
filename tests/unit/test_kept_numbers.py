"""Integers of a saved document: those beyond 64 bits are refused, and texts are none."""

import pytest

from fsdp2prof.workflows.ranks.kept import check_numbers

FINE = [
    b'{"start_ns": 1764288000000000000}',
    b'{"start_ns": [9223372036854775807, -9223372036854775807]}',
    b'{"name": "kernel 99999999999999999999"}',
    b'{"frac": 0.12345678901234567890123}',
]
BEYOND = [
    b'{"start_ns":9223372036854775808}',
    b'{"a": 1764288000000000000, "b": [1, -99999999999999999999]}',
    b'{"a": "99999999999999999999", "b": {"c": 12345678901234567890}}',
]


@pytest.mark.parametrize("content", FINE)
def test_times_of_day_texts_and_fractions_pass(content: bytes) -> None:
    check_numbers(content)


@pytest.mark.parametrize("content", BEYOND)
def test_integers_beyond_64_bits_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="beyond 64 bits"):
        check_numbers(content)
