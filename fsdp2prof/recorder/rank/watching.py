"""``--watch``: one line a training step, for as long as the training runs.

Exposed communication is what FSDP2's own waits cost. On a GPU that is the time between two events on the
compute stream, around each ``wait_event`` that FSDP2 makes it do; on a CPU the time that FSDP2's calls of
collectives block. Nothing is waited for: a line is written when its events have happened, in a later step.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib import import_module
from io import BufferedWriter
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist

from fsdp2prof.manifest import StepInfo, WatchedStep
from fsdp2prof.recorder.guard import guard
from fsdp2prof.run_directory import STEPS_FILE

FLUSH_S = 0.5
_FSDP = "torch.distributed.fsdp._fully_shard"
_COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
)
_Pair = tuple[Any, Any]


class StepLines:
    """Writes ``steps.jsonl`` of one rank."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STEPS_FILE
        self._file: BufferedWriter | None = None
        self._waits: _DeviceWaits | _HostWaits | None = None
        self._device_type = "cpu"
        self._pending: deque[tuple[WatchedStep, Callable[[], int | None]]] = deque()
        self._flushed = 0.0

    def begin(self, device_type: str, *, blocking: bool) -> None:
        """Measure waits from the next step on; ``blocking`` is whether collectives block on a CPU."""
        self._device_type = device_type
        if device_type == "cuda":
            self._waits = _DeviceWaits()
        elif blocking:
            self._waits = _HostWaits()

    def end_step(self, step: StepInfo) -> None:
        """Write the lines of this step and of those before it whose events have happened."""
        line = WatchedStep(
            step=step.step, start_ns=step.start_ns, duration_ns=step.duration_ns, kind=step.kind
        )
        if self._device_type == "cuda":
            stats = torch._C._cuda_memoryStats(torch.cuda.current_device())
            line.allocated_peak_bytes = stats["allocated_bytes"]["all"]["peak"]
            line.reserved_peak_bytes = stats["reserved_bytes"]["all"]["peak"]
            line.retries = stats["num_alloc_retries"]
        else:
            line.resident_peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        self._pending.append((line, self._waits.take() if self._waits is not None else lambda: -1))
        while self._pending:
            line, exposed = self._pending[0]
            exposed_ns = exposed()
            if exposed_ns is None:
                break
            self._write(line, exposed_ns)
            self._pending.popleft()

    def end(self) -> None:
        """Write what is left and stop."""
        if self._waits is not None:
            self._waits.remove()
            self._waits = None
        for line, exposed in self._pending:
            exposed_ns = exposed()
            self._write(line, -1 if exposed_ns is None else exposed_ns)
        self._pending.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def forget(self) -> None:
        """Stop in a forked child, without freeing a CUDA event; what is buffered is the parent's to write."""
        if self._waits is not None:
            self._waits.remove()
        if self._file is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)

    def _write(self, line: WatchedStep, exposed_ns: int) -> None:
        line.exposed_ns = None if exposed_ns < 0 else exposed_ns
        if self._file is None:
            self._file = self._path.open("ab")
        self._file.write(msgspec.json.encode(line) + b"\n")
        now = time.monotonic()
        if now - self._flushed > FLUSH_S:
            self._file.flush()
            self._flushed = now


class _HostWaits:
    """How long the calls of collectives block that FSDP2 makes."""

    def __init__(self) -> None:
        self._blocked_ns = 0
        self._module = cast("Any", import_module(f"{_FSDP}._fsdp_collectives"))
        self._of_module: Any = self._module.dist
        # A module that is torch.distributed but for the collectives that FSDP2 calls.
        timed = ModuleType(dist.__name__)
        timed.__dict__["__getattr__"] = partial(getattr, dist)
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                collective = guard.around("watch", getattr(dist, name), self._enter, at=(dist, name))
                setattr(timed, name, collective)
        self._module.dist = timed

    def take(self) -> Callable[[], int | None]:
        """Begin a new step."""
        blocked, self._blocked_ns = self._blocked_ns, 0
        return lambda: blocked

    def remove(self) -> None:
        """Put back what FSDP2 calls."""
        self._module.dist = self._of_module

    def _enter(self, *_: Any, **__: Any) -> Callable[[bool, Any], None]:
        start = time.perf_counter_ns()

        def leave(*_: Any) -> None:
            self._blocked_ns += time.perf_counter_ns() - start

        return leave


class _DeviceWaits:
    """Time that the compute stream spends in FSDP2's waits."""

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []
        self._free: list[_Pair] = []
        self._wait_event: Any = torch.cuda.Stream.wait_event
        measured: Any = guard.around("watch", self._wait_event, self._enter)
        torch.cuda.Stream.wait_event = measured  # type: ignore[method-assign]

    def _enter(self, stream: Any, *_: Any, **__: Any) -> Callable[[bool, Any], None] | None:
        if not _caller().startswith(_FSDP) or stream != torch.cuda.current_stream():
            return None
        before, after = pair = self._free.pop() if self._free else _new_pair()
        before.record(stream)

        def leave(*_: Any) -> None:
            after.record(stream)
            self._pairs.append(pair)

        return leave

    def take(self) -> Callable[[], int | None]:
        """Begin a new step."""
        pairs, self._pairs = self._pairs, []

        def exposed_ns() -> int | None:
            if not all(after.query() for _, after in reversed(pairs)):
                return None
            total = sum(before.elapsed_time(after) for before, after in pairs)
            self._free.extend(pairs)
            pairs.clear()
            return round(float(total) * 1e6)

        return exposed_ns

    def remove(self) -> None:
        """Put the stream's method back."""
        torch.cuda.Stream.wait_event = self._wait_event  # type: ignore[method-assign]


def _caller() -> str:
    """Name of the module that called the guarded function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


_BETWEEN = frozenset({__name__, "fsdp2prof.recorder.guard", "torch._compile", "torch._dynamo.eval_frame"})


def _new_pair() -> _Pair:
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
