"""Columns of strings: masks of selections, and columns kept when their trace is gone."""

import pickle

import numpy as np
import pytest

from fsdp2prof.tables.columns import IntArray, Strings

NAMES = Strings.intern([f"kernel {i % 40}" if i % 7 else None for i in range(1000)])
SELECTIONS = [np.arange(1000), np.array([3, 5, 3, 7]), np.array([0, 7]), np.empty(0, dtype=np.int64)]


@pytest.mark.parametrize("rows", SELECTIONS)
def test_a_predicate_sees_only_the_values_of_a_selection(rows: IntArray) -> None:
    selected = NAMES.take(rows)
    seen: list[str] = []

    def ends_in_3(name: str) -> bool:
        seen.append(name)
        return name.endswith("3")

    there = [name for name in selected.to_list() if name is not None]
    assert selected.matches(ends_in_3).tolist() == [str(name).endswith("3") for name in selected.to_list()]
    assert sorted(seen) == sorted(set(there))


@pytest.mark.parametrize("rows", SELECTIONS)
def test_a_compact_column_has_the_same_rows_and_no_other_values(rows: IntArray) -> None:
    selected = NAMES.take(rows)
    compact = selected.compact()
    assert compact.to_list() == selected.to_list()
    assert list(compact.values) == [name for name in NAMES.values if name in set(selected.to_list())]


def test_compact_columns_of_several_ranks_share_their_strings() -> None:
    first, second = (pickle.loads(pickle.dumps(NAMES)).compact() for _ in range(2))
    assert all(one is other for one, other in zip(first.values, second.values, strict=True))
