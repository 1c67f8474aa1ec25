"""The two logs of a storage count while they grow: allocations, and labelled ranges of the same thread."""

from __future__ import annotations

import itertools
from array import array
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from fsdp2prof.labels import AUTOGRAD_NODE, RECOMPUTED
from fsdp2prof.tables.allocations import AllocationTable, Stacks
from fsdp2prof.tables.columns import NEVER, IntArray, Strings
from fsdp2prof.tables.trace import LabelTable

_BACKWARD = f"{AUTOGRAD_NODE}: backward"
"""A backward pass goes by the name that autograd's own ranges have in a trace."""


class AllocationLog:
    """Columns of the allocation table while they grow; rows are never removed."""

    def __init__(self) -> None:
        self.size = array("q")
        self.address = array("q")
        self._alloc_order, self._free_order = array("q"), array("q")
        self._alloc_ns, self._free_ns = array("q"), array("q")
        self._stream, self._op, self._stack = array("q"), array("q"), array("q")
        self._orders = itertools.count()  # next() is atomic: finalizers may run on any thread
        self._last_order = -1
        self._ops: dict[Any, int] = {}
        self._stack_rows: dict[tuple[tuple[CodeType, int], ...], int] = {}
        default = torch.cpu.current_stream()
        self._streams: dict[int, tuple[int, object]] = {id(default): (0, default)}

    @property
    def events(self) -> int:
        """Number of allocations and frees so far."""
        return self._last_order + 1

    def allocate(self, size: int, address: int) -> int:
        """Add an allocation of unknown time and return its row."""
        row = len(self.size)
        self.size.append(size)
        self.address.append(address)
        for column in (self._alloc_order, self._alloc_ns, self._op, self._stack):
            column.append(-1)
        self._free_order.append(NEVER)
        self._free_ns.append(NEVER)
        self._stream.append(0)
        return row

    def describe(
        self, row: int, now: int, operator: Any, stack: tuple[tuple[CodeType, int], ...] | None
    ) -> None:
        """Say when, by which operator, on which stream and where in the program a row was allocated."""
        self._alloc_order[row] = self._last_order = next(self._orders)
        self._alloc_ns[row] = now
        self._op[row] = self._ops.setdefault(operator, len(self._ops))
        self._stream[row] = self._current_stream()
        if stack is not None:
            self._stack[row] = self._stack_rows.setdefault(stack, len(self._stack_rows))

    def free(self, row: int, now: int) -> None:
        """Free a row."""
        self._free_order[row] = self._last_order = next(self._orders)
        self._free_ns[row] = now

    def tables(self) -> tuple[AllocationTable, Stacks]:
        """Return the allocations sorted by order, not yet attributed, and their stacks."""
        rows = len(self.size)
        alloc_order = _column(self._alloc_order)
        unknown = Strings.full(rows, None)
        table = AllocationTable(
            alloc_order=alloc_order,
            free_order=_column(self._free_order),
            alloc_ns=_column(self._alloc_ns),
            free_ns=_column(self._free_ns),
            size=_column(self.size),
            address=_column(self.address),
            stream=_column(self._stream),
            pool=unknown,
            step=np.full(rows, -1, dtype=np.int64),
            phase=Strings.full(rows, "other"),
            fqn=unknown,
            activity=unknown,
            category=Strings.full(rows, "unattributed"),
            op=Strings(_column(self._op).astype(np.int32), tuple(_operator_name(op) for op in self._ops)),
            stack=_column(self._stack),
            tag=unknown,
            release_order=_column(self._free_order),
        )
        return table.take(np.argsort(alloc_order, kind="stable")), Stacks.intern(
            [f"{code.co_filename}:{line}:{code.co_name}" for code, line in stack]
            for stack in self._stack_rows
        )

    def _current_stream(self) -> int:
        """Number of the current CPU stream, 0 the default; kept alive so that its id stays its own."""
        stream = torch.cpu.current_stream()
        return self._streams.setdefault(id(stream), (len(self._streams), stream))[0]


class LabelLog:
    """``record_function`` ranges of the tracked thread in the order they were entered, and its backwards."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._start, self._end = array("q"), array("q")
        self._open: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._graph_task, self._graph_task_row = -1, -1
        self._recomputed_row = -1

    def enter(self, label: object, name: str, now: int) -> None:
        """Open the range of one ``record_function``."""
        self._open[label] = len(self._names)
        self._names.append(name)
        self._start.append(now)
        self._end.append(-1)

    def leave(self, label: object, now: int) -> None:
        """Close a range; one entered before the start, or on another thread, is unknown here."""
        row = self._open.pop(label, None)
        if row is not None:
            self._end[row] = now

    def autograd(self, graph_task: int, now: int) -> None:
        """Log a backward pass as one range, from its first operator to its last; -1 means none."""
        if graph_task < 0:
            return
        if graph_task != self._graph_task:
            self._graph_task, self._graph_task_row = graph_task, len(self._names)
            self._names.append(_BACKWARD)
            self._start.append(now)
            self._end.append(now)
        self._end[self._graph_task_row] = now

    def recompute(self, running: bool, now: int) -> None:
        """Log what runs again inside backward as ranges, each from its first operator to its last."""
        if not running:
            self._recomputed_row = -1
            return
        if self._recomputed_row < 0:
            self._recomputed_row = len(self._names)
            self._names.append(RECOMPUTED)
            self._start.append(now)
            self._end.append(now)
        self._end[self._recomputed_row] = now

    def close(self, now: int) -> None:
        """Close every range still open, those that were dropped without being left too."""
        self._end = array("q", (now if end < 0 else end for end in self._end))

    def table(self) -> LabelTable:
        """Return the ranges as thread 0."""
        start = _column(self._start)
        return LabelTable(
            thread=np.zeros(len(start), dtype=np.int64),
            start_ns=start,
            end_ns=_column(self._end),
            name=Strings.intern(self._names),
        )


def _column(values: array[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _operator_name(operator: Any) -> str:
    """``aten::mm`` for an operator overload, the plain text for a resize, both for what one was given."""
    if isinstance(operator, tuple):
        return "".join(map(_operator_name, operator))
    name = getattr(operator, "name", None)
    return str(name()) if callable(name) else str(operator)
