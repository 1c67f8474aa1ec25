"""Exact count of the tensor storages a training process holds, without a caching allocator to ask.

Used by the recorder on CPU runs and by the estimator under ``FakeTensorMode``: both get the same
:class:`~fsdp2prof.tables.MemoryRecording` that a CUDA snapshot gives.

How a storage is seen:

- born: it appears in the result of an operator (a ``TorchDispatchMode`` sees all of them, those of backward
  too, because CPU backward runs on the calling thread);
- freed: its finalizer runs. A storage keeps one Python object for life, so a weak reference to it dies with
  the memory and not with some tensor;
- freed and born again in place: ``UntypedStorage.resize_``, with which FSDP frees and re-allocates unsharded
  parameters, is no operator and is wrapped;
- alive before the start: every tensor the garbage collector knows, and the gradients they hold.

Views share their storage and count once. Not seen: workspaces inside an operator's kernel and buffers inside
a collective's backend, which never become a tensor's storage.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2prof.tables import (
    GIVEN,
    NEVER,
    AllocationTable,
    BlockTable,
    IntArray,
    LabelTable,
    MemoryRecording,
    OomTable,
    SegmentTable,
    Stacks,
    StepTable,
    Strings,
)

__all__ = ["StorageTracker"]

_RESIZE = "UntypedStorage.resize_"
_COMPILED = "torch.compile runs eagerly while storages are counted: what fusing saves is counted too"
_RNG_STATE = "torch.get_rng_state"
_TORCH = Path(torch.__file__).parent
_DISPATCH_FILES = frozenset(
    {__file__, str(_TORCH / "_compile.py"), str(_TORCH / "_dynamo" / "eval_frame.py")}
)
"""Files between an operator's caller and the tracker."""
_BACKWARD = "autograd::engine::evaluate_function: backward"
"""A backward pass goes by the name that autograd's own ranges have in a trace."""


class StorageTracker:
    """Counts storages between :meth:`start` and :meth:`stop` on the calling thread.

    Use it as a context manager or call the two; then :meth:`recording` gives the history. Call
    :meth:`mark_step` where a training step begins. ``record_function`` ranges entered on the thread become
    labels, and so does every backward pass, on the same clock: nanoseconds since the Unix epoch, never back.

    With ``fake_mode`` only that mode's fake tensors count (with the sizes they stand for), without it only
    real tensors. ``stacks`` keeps the Python stack of every allocation.
    """

    def __init__(
        self, *, device: str = "cpu", fake_mode: FakeTensorMode | None = None, stacks: bool = True
    ) -> None:
        self._device = torch.device(device)
        self._fake_mode = fake_mode
        self._stacks = stacks
        self._live: dict[int, _Live] = {}
        self._log = _AllocationLog()
        self._labels = _LabelLog()
        self._steps: list[tuple[int, int, int]] = []
        self._mutable: dict[Any, bool] = {}
        self._clock_offset_ns = 0
        self._end_ns = -1
        self._thread = -1
        self._active = ExitStack()

    def __enter__(self) -> StorageTracker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Register every storage alive now and begin counting. A tracker runs once."""
        self._clock_offset_ns = time.time_ns() - time.perf_counter_ns()
        self._thread = threading.get_ident()
        for tensor in _reachable_tensors():
            if self._counts(tensor):
                self._update(tensor.untyped_storage(), None)
        resize = torch.UntypedStorage.resize_
        enter, leave = record_function.__enter__, record_function.__exit__

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live or (self._fake_mode is None and storage.device == self._device):
                self._update(storage, _RESIZE)
            return result

        def entered(label: record_function) -> Any:
            if threading.get_ident() == self._thread:
                self._labels.enter(id(label), label.name, self._now())
            return enter(label)  # type: ignore[no-untyped-call]

        def left(label: record_function, kind: Any, error: Any, trace: Any) -> Any:
            result = leave(label, kind, error, trace)
            self._labels.leave(id(label), self._now())
            return result

        get_rng_state = torch.get_rng_state

        def rng_state() -> torch.Tensor:
            state = get_rng_state()  # no operator makes it; checkpointing keeps one per call
            self._see(_RNG_STATE, state)
            return state

        self._active.enter_context(_patched(torch.UntypedStorage, "resize_", resize_))
        self._active.enter_context(_patched(torch, "get_rng_state", rng_state))
        self._active.enter_context(_patched(record_function, "__enter__", entered))
        self._active.enter_context(_patched(record_function, "__exit__", left))
        self._active.enter_context(_Dispatch(self._before, self._after))

    def stop(self) -> None:
        """Stop counting; what is still alive stays allocated in the recording."""
        self._active.close()
        self._end_ns = self._now()
        self._close_step(self._end_ns)
        self._labels.close(self._end_ns)
        self._live.clear()  # with the weak references go the finalizers: later deaths are not heard

    def mark_step(self, step: int) -> None:
        """Close the current training step, if any, and begin number ``step``."""
        now = self._now()
        self._close_step(now)
        self._steps.append((step, now, -1))

    def address(self, tensor: torch.Tensor) -> int:
        """Return the address of ``tensor``'s storage in the recording, -1 if it holds nothing.

        The storage's data pointer for real tensors, a number of its own for fake ones. Ask while the tracker
        runs; for a DTensor pass its local tensor.
        """
        live = self._live.get(tensor.untyped_storage()._cdata)
        return -1 if live is None or live.row < 0 else self._log.address[live.row]

    def recording(self) -> MemoryRecording:
        """Return the history counted so far as tables, source ``storage_count`` or ``estimate``."""
        steps = np.asarray(self._steps, dtype=np.int64).reshape(-1, 3)
        allocations, stacks = self._log.tables()
        return MemoryRecording(
            source="storage_count" if self._fake_mode is None else "estimate",
            device=str(self._device),
            allocations=allocations,
            segments=SegmentTable.empty(),
            blocks=BlockTable.empty(),
            labels=self._labels.table(),
            steps=StepTable(step=steps[:, 0], start_ns=steps[:, 1], end_ns=steps[:, 2]),
            stacks=stacks,
            ooms=OomTable.empty(),
            events=self._log.events,
            end_ns=self._end_ns,
            truncated=False,
            settings={},
            warnings=(_COMPILED,) if _has_compiled() else (),
        )

    def _now(self) -> int:
        return time.perf_counter_ns() + self._clock_offset_ns

    def _close_step(self, now: int) -> None:
        if self._steps and self._steps[-1][2] < 0:
            step, start, _ = self._steps[-1]
            self._steps[-1] = (step, start, now)

    def _before(self, operator: Any, arguments: Any) -> None:
        """See what an operator is given: memory made outside torch shows up here for the first time."""
        self._labels.autograd(torch._C._current_graph_task_id(), self._now())
        self._see((GIVEN, operator), arguments)

    def _after(self, operator: Any, arguments: Any, result: Any) -> None:
        """See what an operator returned, and its arguments again if it may have grown them."""
        self._see(operator, result)
        mutable = self._mutable.get(operator)
        if mutable is None:
            schema = getattr(operator, "_schema", None)  # higher-order operators have none
            mutable = self._mutable[operator] = schema is None or schema.is_mutable
        if mutable:
            self._see(operator, arguments)
        self._labels.autograd(torch._C._current_graph_task_id(), self._now())

    def _see(self, operator: Any, item: Any) -> None:
        if isinstance(item, torch.Tensor):
            if self._counts(item):
                self._update(item.untyped_storage(), operator)
        elif isinstance(item, (list, tuple)):
            for value in item:
                self._see(operator, value)
        elif isinstance(item, dict):
            for value in item.values():
                self._see(operator, value)

    def _counts(self, tensor: torch.Tensor) -> bool:
        if tensor.device != self._device:
            return False
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode is self._fake_mode
        return (
            self._fake_mode is None
            and tensor.layout is torch.strided
            and not hasattr(tensor, "__tensor_flatten__")
        )

    def _update(self, storage: torch.UntypedStorage, operator: Any) -> None:
        """Bring the count of one storage up to date: new, grown or shrunk since it was last seen.

        ``operator`` is null for what was alive before the start.
        """
        size = storage.nbytes()
        live = self._live.get(storage._cdata)
        if live is None:
            live = self._live[storage._cdata] = _Live(storage, self._died)
        if size == live.size:
            return
        old, live.row, live.size = live.row, -1, size
        if size:
            address = len(self._log.size) + 1 if self._fake_mode is not None else storage.data_ptr()
            live.row = self._log.allocate(size, address)
            if operator is not None:
                self._log.describe(live.row, self._now(), operator, _python_stack() if self._stacks else None)
        if old >= 0:  # a resize copies, so the old memory goes after the new one came
            self._log.free(old, self._now())

    def _died(self, live: _Live) -> None:
        self._live.pop(live.key, None)
        if live.row >= 0:
            self._log.free(live.row, self._now())


class _Live(weakref.ref[Any]):
    """A tracked storage: reports its death, and knows its row in the log and its size when last seen."""

    __slots__ = ("key", "row", "size")
    key: int
    row: int
    size: int

    def __new__(cls, storage: torch.UntypedStorage, died: Callable[[_Live], None]) -> _Live:
        live = super().__new__(cls, storage, died)
        live.key, live.row, live.size = storage._cdata, -1, 0
        return live


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operator's tensors before and after it runs."""

    supports_higher_order_operators = True

    def __init__(self, before: Callable[[Any, Any], None], after: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before
        self._after = after

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # DTensor and its like unfold into operators on plain tensors
        arguments = (args, kwargs) if kwargs else args
        self._before(func, arguments)
        result = func(*args, **(kwargs or {}))
        self._after(func, arguments, result)
        return result


class _AllocationLog:
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


class _LabelLog:
    """``record_function`` ranges of the tracked thread in the order they were entered, and its backwards."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._start, self._end = array("q"), array("q")
        self._open: dict[int, int] = {}
        self._graph_task, self._graph_task_row = -1, -1

    def enter(self, key: int, name: str, now: int) -> None:
        """Open a range; ``key`` identifies it until it is left."""
        self._open[key] = len(self._names)
        self._names.append(name)
        self._start.append(now)
        self._end.append(-1)

    def leave(self, key: int, now: int) -> None:
        """Close a range; one entered before the start, or on another thread, is unknown here."""
        row = self._open.pop(key, None)
        if row is not None:
            self._end[row] = now

    def autograd(self, graph_task: int, now: int) -> None:
        """Log a backward pass as one range, from its first operator to its last; -1 is no backward."""
        if graph_task < 0:
            return
        if graph_task != self._graph_task:
            self._graph_task, self._graph_task_row = graph_task, len(self._names)
            self._names.append(_BACKWARD)
            self._start.append(now)
            self._end.append(now)
        self._end[self._graph_task_row] = now

    def close(self, now: int) -> None:
        """Close every range still open."""
        for key in list(self._open):
            self.leave(key, now)

    def table(self) -> LabelTable:
        """Return the ranges as thread 0."""
        start = _column(self._start)
        return LabelTable(
            thread=np.zeros(len(start), dtype=np.int64),
            start_ns=start,
            end_ns=_column(self._end),
            name=Strings.intern(self._names),
        )


def _has_compiled() -> bool:
    """Whether torch.compile has made any graph in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


def _column(values: array[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _operator_name(operator: Any) -> str:
    """``aten::mm`` for an operator overload, the plain text for a resize, both for what one was given."""
    if isinstance(operator, tuple):
        return "".join(map(_operator_name, operator))
    name = getattr(operator, "name", None)
    return str(name()) if callable(name) else str(operator)


def _python_stack() -> tuple[tuple[CodeType, int], ...]:
    """Code and line of the frames that called the operator, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _DISPATCH_FILES:
        frame = frame.f_back
    frames: list[tuple[CodeType, int]] = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


def _reachable_tensors() -> Iterator[torch.Tensor]:
    """Yield every tensor the garbage collector knows, and the gradients that only C++ holds."""
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            if not issubclass(type(item), torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(
                item
            ):
                continue
            yield item
            if item.is_leaf and item.grad is not None:
                yield item.grad


@contextmanager
def _patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute of a class or module for a while; an inherited one is inherited again then."""
    own = owner.__dict__.get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
