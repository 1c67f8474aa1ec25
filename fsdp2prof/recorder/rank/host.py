"""What the host did for a rank while a step was captured: was the rank starved, or its GPU slowed down?

Python lines that the training's thread was seen on in a traced step, and garbage collections.

A thread of ours looks a few hundred times a second: that costs the training some microseconds each, where
stacks of every call would slow it several times. Long and repeated calls are seen, short ones are not.
"""

from __future__ import annotations

import gc
import linecache
import os
import resource
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fsdp2prof
from fsdp2prof.manifest import HostSpan, HostStep, MachineInfo
from fsdp2prof.recorder.guard import guard

_INTERVAL_S = 0.005
"""Time between two looks: the interpreter's own interval for switching threads."""
_MOST = 2_000
"""Spans kept of one step."""
_STATE_BYTES = 64
"""Enough to hold a thread's state, which follows its name."""
_SHORT_NS = 100_000
"""Garbage collections below this are summed and not listed."""
_LIBRARIES = tuple(f"{Path(str(one.__file__)).parent}{os.sep}" for one in (torch, fsdp2prof))
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_CALL = torch.nn.Module._wrapped_call_impl.__code__
_WRAPPERS = frozenset(
    {"wrapper", "decorate_context", "inner", "inner_func", "guarded", "fn", "_fn", "_no_grad_wrapper"}
)
"""Names of functions that only call another."""


Seen = tuple[list[HostSpan], list[HostSpan], list[HostSpan]]
"""Lines of a thread, lines that had called a module, and times in which it slept, each in order."""


class Sightings:
    """Where one thread is, from :meth:`begin` to :meth:`end`."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._state = f"/proc/self/task/{threading.get_native_id()}/stat"
        self._over = threading.Event()
        self._spans: Seen = [], [], []
        guard.thread("host", self._watch)

    def end(self) -> Seen:
        """Stop looking and return what was seen."""
        self._over.set()
        spans, self._spans = self._spans, ([], [], [])
        return spans

    def _watch(self) -> None:
        spans, last = self._spans, ["", "", ""]
        while not self._over.wait(_INTERVAL_S) and max(map(len, spans)) < _MOST:
            frame = sys._current_frames().get(self._thread)
            now = time.time_ns()
            lines = [_line(frame), _line(_caller(frame)), "asleep" if _sleeps(self._state) else ""]
            for seen, line, before in zip(spans, lines, last, strict=True):
                if line and line == before:
                    seen[-1].duration_ns = max(0, now - seen[-1].start_ns)
                elif line:
                    seen.append(HostSpan(start_ns=now, line=line))
            last = lines


def _sleeps(state: str) -> bool:
    """Whether a thread neither runs nor is ready to: it sleeps, or waits for I/O (proc(5), ``stat``).

    The file is opened each time: a descriptor that stays open is one that the training may close and reuse.
    """
    text = b""
    with suppress(OSError):  # not Linux
        descriptor = os.open(state, os.O_RDONLY)
        try:
            text = os.read(descriptor, _STATE_BYTES)
        finally:
            os.close(descriptor)
    return text.rpartition(b") ")[2][:1] in (b"S", b"D")


class Collections:
    """Garbage collections of the process, from the beginning to :meth:`end`."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.spans: list[HostSpan] = []
        self._began = 0
        self._callback = guard.hook("host", self._note)
        gc.callbacks.append(self._callback)

    def end(self) -> None:
        """Stop timing them."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now = time.time_ns()
        if phase == "start":
            self._began = now
        elif self._began:
            took = max(0, now - self._began)
            self.total_ns += took
            if took >= _SHORT_NS and len(self.spans) < _MOST:
                self.spans.append(HostSpan(start_ns=self._began, duration_ns=took))
            self._began = 0


def cpu_of_threads() -> dict[int, int]:
    """Return the CPU time of every other Python thread that the training started, by its identity (Linux)."""
    found = {}
    mine = threading.get_ident()
    for thread in threading.enumerate():
        # Autograd's threads are dummies: what they run is the training's own work.
        dummy = isinstance(thread, threading._DummyThread)
        if dummy or thread.ident is None or thread.native_id is None or thread.ident == mine:
            continue
        try:
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            found[thread.ident] = int(text.split()[0])
        except (OSError, ValueError, IndexError):
            continue
    return found


def line_of_thread(thread: int) -> str:
    """Return the line that a thread is on; empty where it is in no code of the training's."""
    return _line(sys._current_frames().get(thread))


def _line(frame: FrameType | None) -> str:
    """Name the innermost line outside torch, other libraries and this package, and what it calls.

    ``full_tensor() in train.py:88 (clip)``; empty where no frame is such a line.
    """
    inner: list[str] = []
    for one in _outwards(frame):
        code = one.f_code
        if not _is_library(code.co_filename):
            hook = ", a hook" if _is_of_hook(one) else ""
            at = f"{_short(code.co_filename)}:{one.f_lineno} ({_function(one)}{hook})"
            called = next((name for name in reversed(inner) if name not in _WRAPPERS), "_")
            return at if called.startswith(("_", "<")) else f"{called}() in {at}"
        inner.append(code.co_name)
    return ""


_INNER_SCOPES = frozenset({"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>"})
"""Names of code that a function holds and that has none of its own."""


def _function(frame: FrameType) -> str:
    """Name the function of a frame; of an expression's own code, the one in the same file that runs it."""
    for one in _outwards(frame):
        if one.f_code.co_filename != frame.f_code.co_filename:
            break
        if one.f_code.co_name not in _INNER_SCOPES:
            return one.f_code.co_name
    return frame.f_code.co_name


def _is_of_hook(frame: FrameType) -> bool:
    """Whether a module calls the training's code that runs as a hook, not as its forward."""
    for one in _outwards(frame):
        file = one.f_code.co_filename
        if file == _CALL.co_filename:
            return "hook(" in linecache.getline(file, one.f_lineno)
        if _is_library(file):
            return False
    return False


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called the outermost module which runs; None where none does."""
    found = None
    for one in _outwards(frame):
        if one.f_code is _CALL:
            found = one
    return found


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    """Whether a file is torch's, ours, the standard library's, or of a package beside the training."""
    standard = file.startswith(_STANDARD) and "-packages" not in file[len(_STANDARD) :]
    return standard or file.startswith((*_LIBRARIES, "<")) or _knows_no_torch(file)


def _knows_no_torch(file: str) -> bool:
    """Whether a file is of an installed package that imports no torch: arrays, images, text, not training."""
    _, installed, inside = file.rpartition(f"-packages{os.sep}")
    package = inside.partition(os.sep)[0].removesuffix(".py")
    return bool(installed) and not any(
        getattr(module, "__dict__", {}).get("torch") is torch
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == package
    )


@lru_cache(maxsize=4096)
def _short(file: str) -> str:
    """The last two parts of a path outside the working directory, else the part inside it."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(Path(*path.parts[-2:]))


_NOTED = 0.01
"""Part of a step that another Python thread computes, from which on it is noted."""
_MONITORING_TOOLS = 6
"""Tools that ``sys.monitoring`` has room for."""
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
"""Columns of the first line of ``/proc/stat`` (proc(5)); 8 and 9, guests, are in the first two."""
_SLOWED = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x20: "thermal_slowdown",
    0x40: "hardware_thermal_slowdown",
    0x80: "power_brake",
}
"""NVML's reasons for a lower clock that a cause outside of the program has (``nvmlClocksEventReasons``)."""


def machine_info() -> MachineInfo:
    """Describe the processors that this rank may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    return MachineInfo(
        cores=os.cpu_count() or 0,
        usable_cores=usable,
        torch_threads=torch.get_num_threads(),
        torch_interop_threads=torch.get_num_interop_threads(),
        python_hooks=_python_hooks(),
    )


def _python_hooks() -> list[str]:
    """Name what sees every call of this thread (``sys.setprofile``, ``sys.settrace``, ``sys.monitoring``)."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = [monitoring.get_tool(number) for number in range(_MONITORING_TOOLS)] if monitoring else []
    hooks = [hook for hook in (sys.getprofile(), sys.gettrace()) if hook is not None]
    tools += [getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks]
    return sorted({str(tool).partition(".")[0] for tool in tools if tool} - {"torch"})


@dataclass(frozen=True, slots=True)
class _Reading:
    process_ns: int
    thread_ns: int
    waiting_ns: int | None
    preemptions: int
    machine: tuple[int, int, int] | None
    """Busy, stolen and all time of all cores."""
    quota_ns: int | None
    threads: dict[int, int]
    """CPU time of the other Python threads, by identity."""
    at_ns: int


class HostLoad:
    """Reads the host's counters where a captured step begins and ends, on the thread that trains."""

    def __init__(self) -> None:
        self._begun: _Reading | None = None
        self._collections: Collections | None = None
        self._sightings: Sightings | None = None
        self._gpu = _Gpu()

    def begin(self, *, traced: bool = False) -> None:
        """A captured step begins; of a ``traced`` one the lines are kept that it spends its time on."""
        self.stop()
        self._collections = Collections()
        self._sightings = Sightings() if traced else None
        self._begun = _read()

    def stop(self) -> None:
        """Leave nothing in the training."""
        if self._collections is not None:
            self._collections.end()
        if self._sightings is not None:
            self._sightings.end()
        self._collections = self._sightings = None

    def end(self, step: int) -> HostStep | None:
        """Return what was seen in the step that ends; None where its beginning was not."""
        before, self._begun = self._begun, None
        if before is None:
            return None
        now = _read()
        collections, sightings = self._collections, self._sightings
        lines, callers, sleeps = ([], [], []) if sightings is None else sightings.end()
        self.stop()
        seen = HostStep(
            step=step,
            load_average=os.getloadavg()[0],
            cpu_time_ns=now.process_ns - before.process_ns,
            main_thread_cpu_ns=now.thread_ns - before.thread_ns,
            main_thread_waiting_ns=_growth(before.waiting_ns, now.waiting_ns),
            preemptions=now.preemptions - before.preemptions,
            quota_throttled_ns=_growth(before.quota_ns, now.quota_ns),
            slowed_by=self._gpu.slowed_by(),
            garbage_collection_ns=None if collections is None else collections.total_ns,
            garbage_collections=[] if collections is None else collections.spans,
            lines=lines,
            callers=callers,
            sleeps=sleeps,
            python_threads=_threads(before, now),
        )
        if before.machine is not None and now.machine is not None:
            # Counters of single cores may go back a little (proc(5)).
            grown = (max(0, b - a) for a, b in zip(before.machine, now.machine, strict=True))
            seen.machine_busy_ns, seen.machine_steal_ns, seen.machine_time_ns = grown
        return seen


def _threads(before: _Reading, now: _Reading) -> dict[str, int]:
    """Return CPU time of the other Python threads that took some of the step, by the line they are on."""
    found: dict[str, int] = {}
    for ident, cpu_ns in now.threads.items():
        took = cpu_ns - before.threads.get(ident, 0)
        line = line_of_thread(ident) if took >= _NOTED * (now.at_ns - before.at_ns) else ""
        if line:
            found[line] = found.get(line, 0) + took
    return found


def _growth(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else max(0, now - before)


def _read() -> _Reading:
    return _Reading(
        process_ns=time.process_time_ns(),
        thread_ns=time.thread_time_ns(),
        waiting_ns=_number("/proc/thread-self/schedstat", 1),
        preemptions=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
        machine=_machine(),
        quota_ns=_quota(),
        threads=cpu_of_threads(),
        at_ns=time.time_ns(),
    )


def _machine() -> tuple[int, int, int] | None:
    try:
        fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]
        ticks = [int(field) * _TICK_NS for field in fields]
        idle, steal = ticks[_IDLE] + ticks[_IOWAIT], ticks[_STEAL]
    except (OSError, ValueError, IndexError):
        return None
    return sum(ticks) - idle - steal, steal, sum(ticks)


def _number(file: str, at: int) -> int | None:
    try:
        return int(Path(file).read_text().split()[at])
    except (OSError, ValueError, IndexError):
        return None


def _quota() -> int | None:
    """Time in which a cgroup's CPU quota kept the container from running (cgroup v2)."""
    with suppress(OSError, ValueError):
        for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines():
            if line.startswith("throttled_usec "):
                return int(line.split()[1]) * 1000
    return None


class _Gpu:
    """The rank's GPU as NVML sees it, where pynvml is installed."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._tried = False

    def slowed_by(self) -> list[str] | None:
        """Return why its clock is lowered at the moment; None where that is unknown."""
        if not self._tried and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._tried = True
            with suppress(Exception):  # no pynvml, no driver, or a device that NVML does not know
                self._open()
        if self._handle is None:
            return None
        try:
            reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except self._nvml.NVMLError:
            return None
        return [name for bit, name in _SLOWED.items() if reasons & bit]

    def _open(self) -> None:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self._nvml = pynvml
