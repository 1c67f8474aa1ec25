"""Columns and the operations of every table: select rows, concatenate, become a DataFrame."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self


IntArray: TypeAlias = npt.NDArray[np.int64]
CompactArray: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""Numbers that are compared, not added up: 32 bits each where all fit, half the bytes of a trace."""
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NEVER = int(np.iinfo(np.int64).max)
"""Time and order of what had not happened when a recording ended: the free of a living allocation."""

_FEW = 6
"""Distinct values up to which a mask is made by comparing."""
_ROWS_A_VALUE = 16
"""Rows per value up to which looking for the values that occur takes less time than a predicate on all."""


@dataclass(frozen=True, slots=True)
class Strings:
    """A column of interned strings: ``codes`` (int32, -1 is None) index into ``values``."""

    codes: npt.NDArray[np.int32]
    values: tuple[str, ...]

    @classmethod
    def intern(cls, items: Iterable[str | None]) -> Strings:
        """Build a column from Python strings; ``None`` becomes code -1."""
        items = list(items)
        distinct = dict.fromkeys(items)
        distinct.pop(None, None)
        table: dict[str | None, int] = {value: code for code, value in enumerate(distinct)} | {None: -1}
        codes = np.fromiter(map(table.__getitem__, items), dtype=np.int32, count=len(items))
        return cls(codes, tuple(value for value in distinct if value is not None))

    @classmethod
    def full(cls, length: int, value: str | None) -> Strings:
        """Build a column of one repeated value."""
        code = -1 if value is None else 0
        return cls(np.full(length, code, dtype=np.int32), () if value is None else (value,))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> str | None:
        code = int(self.codes[row])
        return None if code < 0 else self.values[code]

    def take(self, rows: npt.NDArray[Any]) -> Strings:
        """Select rows by index or mask; the values stay as they are."""
        return Strings(self.codes[rows], self.values)

    def lookup(self, rows: npt.NDArray[Any]) -> Strings:
        """Select rows by index; -1 gives None (as from a join that found nothing)."""
        return Strings(np.append(self.codes, np.int32(-1))[rows], self.values)

    def occurring(self) -> IntArray:
        """Return the codes that occur, ascending: after a selection, often few of all values."""
        return np.flatnonzero(np.bincount(self.codes + 1, minlength=len(self.values) + 1)[1:])

    def compact(self) -> Strings:
        """Return the column without the values that no row has, its strings shared between such columns."""
        occurring = self.occurring()
        codes = np.full(len(self.values) + 1, -1, dtype=np.int32)
        codes[occurring] = np.arange(len(occurring), dtype=np.int32)
        return Strings(codes[self.codes], tuple(sys.intern(self.values[code]) for code in occurring.tolist()))

    def matches(self, predicate: Callable[[str], bool]) -> BoolArray:
        """Mask of the rows whose string satisfies ``predicate``, evaluated once per distinct value."""
        if len(self.codes) < _ROWS_A_VALUE * len(self.values):
            codes = self.occurring().tolist()
            hits = [*compress(codes, map(predicate, [self.values[code] for code in codes]))]
        else:
            hits = [*compress(range(len(self.values)), map(predicate, self.values))]
        if len(hits) <= _FEW:
            # Comparing is several times faster than indexing, and needs no 64-bit copy of the codes.
            mask = np.zeros(len(self.codes), dtype=np.bool_)
            for code in hits:
                mask |= self.codes == code
            return mask
        hit = np.zeros(len(self.values) + 1, dtype=np.bool_)
        hit[hits] = True
        return hit[self.codes]

    def equals(self, value: str | None) -> BoolArray:
        """Mask of the rows equal to ``value``; ``None`` asks for the rows without one."""
        if value is None:
            return np.asarray(self.codes < 0)
        mask = np.zeros(len(self.codes), dtype=np.bool_)
        for code in self._codes_of(value):
            mask |= self.codes == code
        return mask

    def _codes_of(self, value: str) -> Iterator[int]:
        """Positions of a value, most often one; searched for at C speed."""
        code = -1
        for _ in range(self.values.count(value)):
            code = self.values.index(value, code + 1)
            yield code

    def to_list(self) -> list[str | None]:
        """Decode to Python strings."""
        lookup = [*self.values, None]
        return [lookup[code] for code in self.codes]


class Table:
    """Base of the tables: equal lengths checked once, row selection, and a DataFrame for users."""

    __slots__ = ()

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{type(self).__name__}: columns differ in length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    @classmethod
    def empty(cls) -> Self:
        """Build an empty table."""
        columns: dict[str, Any] = {}
        for field in fields(cls):  # type: ignore[arg-type]
            kind = {"Strings": Strings.full(0, None), "BoolArray": np.zeros(0, dtype=np.bool_)}
            columns[field.name] = kind.get(str(field.type), np.zeros(0, dtype=np.int64))
        return cls(**columns)

    def take(self, rows: npt.NDArray[Any]) -> Self:
        """Select rows by index array or mask."""
        columns = {}
        for field in fields(self):  # type: ignore[arg-type]
            column = getattr(self, field.name)
            columns[field.name] = column.take(rows) if isinstance(column, Strings) else _select(column, rows)
        return type(self)(**columns)

    def compact(self) -> Self:
        """Return the table with compact columns of strings: to keep it when the trace is gone."""
        strings = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return self.with_columns(
            **{name: column.compact() for name, column in strings.items() if isinstance(column, Strings)}
        )

    def with_columns(self, **columns: Any) -> Self:
        """Return a copy with some columns replaced."""
        return replace(self, **columns)  # type: ignore[type-var]

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a DataFrame, strings decoded (imports pandas)."""
        import pandas as pd

        data = {}
        for field in fields(self):  # type: ignore[arg-type]
            column = getattr(self, field.name)
            data[field.name] = column.to_list() if isinstance(column, Strings) else column
        return pd.DataFrame(data)


def _select(column: Any, rows: npt.NDArray[Any]) -> Any:
    if isinstance(column, np.ndarray):
        return column[rows]
    index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    return tuple(column[int(i)] for i in index)


_TableT = TypeVar("_TableT", bound=Table)


def concat_tables(tables: Sequence[_TableT]) -> _TableT:
    """Concatenate tables of one type, in order; at least one."""
    columns: dict[str, Any] = {}
    for field in fields(tables[0]):  # type: ignore[arg-type]
        parts = [getattr(table, field.name) for table in tables]
        if isinstance(parts[0], Strings):
            columns[field.name] = concat_strings(parts)
        elif isinstance(parts[0], np.ndarray):
            columns[field.name] = np.concatenate(parts)
        else:
            columns[field.name] = tuple(item for part in parts for item in part)
    return type(tables[0])(**columns)


def concat_strings(columns: Sequence[Strings]) -> Strings:
    """Concatenate interned columns, merging their values."""
    table: dict[str, int] = {}
    codes = []
    for column in columns:
        lookup = np.asarray([table.setdefault(v, len(table)) for v in column.values] + [-1], dtype=np.int32)
        codes.append(lookup[column.codes])
    merged = np.concatenate(codes) if codes else np.empty(0, dtype=np.int32)
    return Strings(merged, tuple(table))
