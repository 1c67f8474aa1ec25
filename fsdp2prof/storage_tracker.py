"""Exact count of the tensor storages a training process holds, without a caching allocator to ask.

Used by the recorder on CPU runs and by the estimator under ``FakeTensorMode``: both get the same
:class:`~fsdp2prof.tables.MemoryRecording` that a CUDA snapshot gives.

How a storage is seen:

- born: it appears in the result of an operator (a ``TorchDispatchMode`` sees all of them, those of backward
  too, because CPU backward runs on the calling thread);
- freed: its finalizer runs. A storage keeps one Python object for life, so a weak reference to it dies with
  the memory and not with some tensor;
- freed and born again in place: ``UntypedStorage.resize_``, with which FSDP frees and re-allocates unsharded
  parameters, is not an operator, so it is wrapped;
- alive before the start: every tensor the garbage collector knows, and the gradients they hold.

Views share their storage and count once. Not seen: workspaces inside an operator's kernel and buffers inside
a collective's backend, which never become a tensor's storage.

Every operator that runs on plain tensors, seen before and after it.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from fsdp2prof.storage_log import AllocationLog, LabelLog
from fsdp2prof.tables.allocations import GIVEN, BlockTable, MemoryRecording, OomTable, SegmentTable
from fsdp2prof.tables.trace import StepTable

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What an operator is given: by position, by name."""


class PlainOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``before(operator, arguments)`` and ``after(operator, arguments, result)`` around every operator.

    A DTensor and its like are not seen themselves: they unfold into operators on plain tensors, which are.
    """

    supports_higher_order_operators = True

    def __init__(
        self, before: Callable[[Any, Arguments], None], after: Callable[[Any, Arguments, Any], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observers: tuple[Callable[..., None], Callable[..., None]] | None = before, after
        self._has_left = False
        self._unfolding: tuple[Any, tuple[bool, ...]] | None = None
        self.needed: tuple[bool, ...] | None = None
        """Which arguments of a DTensor's operator, of which the observed one is the part of this rank, need a
        gradient: the parts themselves never do. Null of others."""

    def leave(self) -> bool:
        """Observe nothing more, and leave torch's stack of modes where this mode is on top of it.

        It is not on top inside an operator, on another thread, or below a mode of the program, which torch
        would take off the stack instead. There this mode stays and does nothing until it is left again.
        Returns whether it has left.
        """
        self._observers = None
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._has_left = True
        return self._has_left

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                self._unfolding = func, tuple(getattr(one, "requires_grad", False) for one in args)
                return NotImplemented
        arguments = _with_tensors(func, args, kwargs or {})
        if (observers := self._observers) is None:
            return func(*arguments[0], **arguments[1])
        before, after = observers
        before(func, arguments)
        result = func(*arguments[0], **arguments[1])
        self.needed = None
        if self._unfolding is not None and self._unfolding[0] is func:
            self.needed, self._unfolding = self._unfolding[1], None
        after(func, arguments, result)
        return result


def _with_tensors(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments with tensors for the numbers that torch hands to a mode instead.

    A tensor that stands for a number of Python's, as a constant that ``torch.jit.trace`` keeps, is a number
    here; few operators take one in its place.
    """
    positions = _tensors_alone.get(operator)
    if positions is None:
        positions = _tensors_alone[operator] = _positions_of_tensors(operator)
    if positions and any(type(one) in _NUMBERS for one in args):
        args = tuple(
            torch.tensor(one, dtype=_NUMBERS[type(one)]) if type(one) in _NUMBERS and n in positions else one
            for n, one in enumerate(args)
        )
    return args, kwargs


def _positions_of_tensors(operator: Any) -> frozenset[int]:
    """Positions at which an operator takes a tensor and no number."""
    try:
        takes_numbers = torch._C._should_allow_numbers_as_tensors(operator._schema.name.split("::")[-1])
        given = () if takes_numbers else operator._schema.arguments
        return frozenset(n for n, one in enumerate(given) if "Tensor" in str(one.type))
    except (AttributeError, TypeError):  # a higher-order operator, another torch
        return frozenset()


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_tensors_alone: dict[Any, frozenset[int]] = {}


_TICK_NS = 1000
_RESIZE = "UntypedStorage.resize_"
_COMPILED = "torch.compile runs eagerly while storages are counted: what fusing saves is counted too"
_RNG_STATE = "torch.get_rng_state"
_OF_COMPILER = " (dynamo_timed)"
"""Ends the ranges that torch.compile (2.10 and older) puts around its own work: no part of a step."""
_TORCH = Path(torch.__file__).parent
_DISPATCH_FILES = frozenset(
    {
        __file__,
        __file__,
        str(Path(__file__).parent / "recorder" / "guard.py"),
        str(_TORCH / "_compile.py"),
        str(_TORCH / "_dynamo" / "eval_frame.py"),
    }
)
"""Files between an operator's caller and the tracker."""


class StorageTracker:
    """Counts storages between :meth:`start` and :meth:`stop` on the calling thread.

    Use it as a context manager or call the two; then :meth:`recording` gives the history. Call
    :meth:`mark_step` where a training step begins. ``record_function`` ranges entered on the thread become
    labels, and so does every backward pass, on the same clock: nanoseconds since the Unix epoch, never back.

    With ``fake_mode`` only that mode's fake tensors count (with the sizes they stand for), without it only
    real tensors. What happens on paper takes no time: the clock then ticks a microsecond whenever it is
    read, from 0, and equal programs give equal recordings. ``stacks`` keeps the Python stack of every
    allocation. ``around(function, enter)`` puts ``enter`` around one of torch's functions (:func:`_around`);
    ``hook(function)`` returns what torch and the interpreter may call of the tracker's.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        fake_mode: FakeTensorMode | None = None,
        stacks: bool = True,
        around: Callable[[Callable[..., Any], Callable[..., Any]], Callable[..., Any]] | None = None,
        hook: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        self._device = torch.device(device)
        self._fake_mode = fake_mode
        self._stacks = stacks
        self._live: dict[int, _Live] = {}
        self._log = AllocationLog()
        self._labels = LabelLog()
        self._steps: list[tuple[int, int, int]] = []
        self._mutable: dict[Any, bool] = {}
        self._clock_offset_ns = 0
        self._ticks = itertools.count(0, _TICK_NS)
        self._end_ns = -1
        self._thread = -1
        self._active = ExitStack()
        self._around = around or _around
        self._die = hook(self._died)
        self._operators = PlainOperators(hook(self._before), hook(self._after))

    def __enter__(self) -> StorageTracker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Register every storage alive now and begin counting. A tracker runs once."""
        self._clock_offset_ns = _epoch_offset_ns()
        self._thread = threading.get_ident()
        for tensor in _reachable_tensors():
            if self._counts(tensor):
                self._update(tensor.untyped_storage(), None)
        for owner, name, enter in (
            (torch.UntypedStorage, "resize_", self._resize),
            (torch, "get_rng_state", self._get_rng_state),
            (record_function, "__enter__", self._enter_label),
            (record_function, "__exit__", self._leave_label),
        ):
            watched = self._around(getattr(owner, name), enter)
            self._active.enter_context(_patched(owner, name, watched))
        self._active.callback(self.leave)
        self._operators.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop counting; what is still alive stays allocated in the recording."""
        self._active.close()
        self._end_ns = self._now()
        self._close_step(self._end_ns)
        self._labels.close(self._end_ns)
        self._live.clear()  # with the weak references go the finalizers: later deaths are not heard

    def leave(self) -> bool:
        """Take the mode out of torch's stack; False where that has to wait (:meth:`PlainOperators.leave`)."""
        return self._operators.leave()

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
            warnings=(_COMPILED,) if has_compiled() else (),
        )

    def _now(self) -> int:
        if self._fake_mode is not None:
            return next(self._ticks)
        return time.perf_counter_ns() + self._clock_offset_ns

    def _close_step(self, now: int) -> None:
        if self._steps and self._steps[-1][2] < 0:
            step, start, _ = self._steps[-1]
            self._steps[-1] = (step, start, now)

    def _resize(self, storage: torch.UntypedStorage, *_: Any, **__: Any) -> Callable[..., None]:
        def resized(*_: Any) -> None:
            if storage._cdata in self._live or (self._fake_mode is None and storage.device == self._device):
                self._update(storage, _RESIZE)

        return resized

    def _get_rng_state(self) -> Callable[..., None]:
        """No operator makes it; checkpointing keeps one per call."""

        def got(returned: bool, state: Any) -> None:
            self._log_backward()
            self._see(_RNG_STATE, state)

        return got

    def _enter_label(self, label: record_function) -> None:
        if threading.get_ident() == self._thread and not label.name.endswith(_OF_COMPILER):
            self._labels.enter(label, label.name, self._now())

    def _leave_label(self, label: record_function, *_: Any) -> Callable[..., None]:
        return lambda *_: self._labels.leave(label, self._now())

    def _before(self, operator: Any, arguments: Arguments) -> None:
        """See what an operator is given: memory made outside torch shows up here for the first time."""
        self._log_backward()
        self._see((GIVEN, operator), arguments)

    def _after(self, operator: Any, arguments: Arguments, result: Any) -> None:
        """See what an operator returned, and its arguments again if it may have grown them."""
        self._see(operator, result)
        mutable = self._mutable.get(operator)
        if mutable is None:
            schema = getattr(operator, "_schema", None)  # higher-order operators have none
            mutable = self._mutable[operator] = schema is None or schema.is_mutable
        if mutable:
            self._see(operator, arguments)
        self._log_backward()

    def _log_backward(self) -> None:
        """Log that a backward runs; without stacks also whether it runs a forward again.

        Autograd's own operators run without gradients, those of a recomputed forward with them.
        """
        task, now = torch._C._current_graph_task_id(), self._now()
        self._labels.autograd(task, now)
        if not self._stacks:
            self._labels.recompute(task >= 0 and torch.is_grad_enabled(), now)

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

        ``operator`` is None for what was alive before the start.
        """
        size = storage.nbytes()
        live = self._live.get(storage._cdata)
        if live is None:
            if self._fake_mode is None and not _has_memory(storage):
                return
            live = self._live[storage._cdata] = _Live(storage, self._die)
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


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether a storage can have memory; not that of a tensor that only wraps others."""
    try:
        storage.data_ptr()
    except RuntimeError:
        return False
    return True


def _around(function: Callable[..., Any], enter: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``enter`` before the function, what that returns after it: with whether it returned, and what."""

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        leave = enter(*args, **kwargs)
        result = function(*args, **kwargs)
        if leave is not None:
            leave(True, result)
        return result

    return watched


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


def has_compiled() -> bool:
    """Whether torch.compile has made any graph in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


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
            gradient = _gradient(item)
            if gradient is not None:
                yield gradient


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf else None
    except (
        RuntimeError
    ):  # a view of a custom function, which autograd will not describe after a change in place
        return None


def _epoch_offset_ns() -> int:
    """Nanoseconds to add to ``perf_counter_ns`` for time since the epoch.

    The tightest of several readings, since a thread that is preempted between two clocks is off by as much.
    """
    readings = []
    for _ in range(16):
        before, now, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        readings.append((after - before, now - (before + after) // 2))
    return min(readings)[1]


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
