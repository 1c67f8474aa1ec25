"""The captures of a rank, step by step: on schedule, and out of the way of the training's own profiler.

Which training step is captured how, and what becomes of that where a step cannot be captured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from fsdp2prof.manifest import Pause, RecordOptions
from fsdp2prof.recorder import devices
from fsdp2prof.recorder.guard import Part, guard
from fsdp2prof.recorder.memory.history import CpuMemoryCapture, CudaMemoryCapture, memory_capture, why_not
from fsdp2prof.recorder.model.describe import add_forward_order
from fsdp2prof.recorder.model.roots import Roots
from fsdp2prof.recorder.model.step_counts import RootSteps
from fsdp2prof.recorder.rank.agreement import StepsThatFit
from fsdp2prof.recorder.rank.host import HostLoad
from fsdp2prof.recorder.rank.manifest import ManifestFile
from fsdp2prof.recorder.rank.tracing import TraceCapture, adopt_trace
from fsdp2prof.recorder.rank.training_profilers import training_profilers
from fsdp2prof.recorder.settings import leader, warmup_of
from fsdp2prof.run_directory import SNAPSHOT_FILE, STORAGE_COUNT_FILE, TRACE_FILE
from fsdp2prof.units import format_bytes

StepKind: TypeAlias = Literal["plain", "warmup", "traced", "memory"]
_MemoryCapture: TypeAlias = CudaMemoryCapture | CpuMemoryCapture

MAX_ATTEMPTS = 3
"""Times a part of the schedule is begun: a gap that was too short so often will not grow."""


@dataclass(slots=True)
class _Part:
    """Steps in a row that are captured together."""

    kind: Literal["traced", "memory"]
    warmup: int
    steps: int
    measured: int | None = None
    """Position of the warm-up's step that is traced on its own, for its size."""
    left_out: int = 0
    """Plain steps after the captured ones, in their place."""
    attempts: int = 0

    @property
    def length(self) -> int:
        return self.warmup + self.steps + self.left_out

    def kind_of(self, position: int) -> StepKind:
        if position < self.warmup:
            return "warmup"
        return self.kind if position < self.warmup + self.steps else "plain"


class Schedule:
    """Plain steps, a warm-up, the traced steps, the memory steps, then plain ones again; steps count from 0.

    Where a step cannot be captured, :meth:`put_off` moves what is left behind it.
    """

    def __init__(self, options: RecordOptions) -> None:
        warmup = warmup_of(options)
        first = options.wait + (warmup or options.warmup) if options.at_step is None else options.at_step
        measured = None if options.max_trace_size is None else options.warmup
        parts = [_Part("traced", warmup, options.active, measured)]
        if options.memory:
            parts.append(_Part("memory", 0, options.memory_steps))
        self._parts = [part for part in parts if part.steps]
        self._start = first - warmup  # negative where a warm-up is asked for and there are no steps for it

    @property
    def end(self) -> int:
        """First step after all that is still to be captured."""
        return self._start + sum(part.length for part in self._parts)

    def kind(self, step: int) -> StepKind:
        """Return how ``step`` is captured."""
        for start, part in self._placed():
            if start <= step < start + part.length:
                return part.kind_of(step - start)
        return "plain"

    def is_measured(self, step: int) -> bool:
        """Whether ``step`` belongs to the warm-up and is traced on its own, for its size."""
        return any(part.measured == step - start for start, part in self._placed())

    def shorten(self, steps: int) -> None:
        """Trace so many steps; the other kind stays at its steps."""
        for part in self._parts:
            if part.kind == "traced":
                part.steps, part.left_out = steps, part.left_out + part.steps - steps

    def put_off(self, step: int, *, begun: bool = False, keep: bool = False) -> None:
        """Capture what is left behind ``step``, which itself is not captured.

        A part that had ``begun`` comes after the others next time, and not again after
        :data:`MAX_ATTEMPTS`; with ``keep`` the steps it has got are enough.
        """
        left, last = [], []
        for start, part in self._placed():
            if start + part.length <= step:
                continue
            if start > step or not (begun or start < step):
                left.append(part)
            elif not keep:
                part.attempts += 1
                last = [part] if part.attempts < MAX_ATTEMPTS else []
        self._parts, self._start = left + last, step + 1

    def bring_forward(self, step: int) -> bool:
        """Begin with ``step`` what was put off behind it; not if its first step has to be whole."""
        if self._start == step + 1 and self.kind(step + 1) in ("warmup", "memory"):
            self._start = step
            return True
        return False

    def leave_out(self, kind: Literal["traced", "memory"]) -> None:
        """Capture nothing of a kind any more; the other kind stays at its steps."""
        placed = [(start, part) for start, part in self._placed() if part.kind != kind]
        if placed:
            self._start = placed[0][0]
        self._parts = [part for _, part in placed]

    def _placed(self) -> Iterator[tuple[int, _Part]]:
        start = self._start
        for part in self._parts:
            yield start, part
            start += part.length


SAID_FROM_NS = 1_000_000_000
"""Shorter pauses are in the manifest alone."""


class Captures:
    """Begins and ends the trace and the memory recording at the boundaries of training steps.

    torch has one profiler, and the training's own comes first: no step in which it is set up or runs is
    captured. What is scheduled then moves behind it; what it interrupts is kept if a step of it is whole, and
    tried again later if none is. Where it leaves no gap, its own Chrome trace replaces ours.
    """

    def __init__(self, file: ManifestFile, options: RecordOptions, roots: Roots) -> None:
        self._file = file
        self._manifest = file.manifest
        self._options = options
        self._is_first = self._manifest.rank == leader(options.ranks, self._manifest.world_size)
        self._roots = roots
        self._schedule = Schedule(options)
        self._step = 0
        self._kind: StepKind = "plain"
        self._profiled = False
        self._was_put_off = False
        self._gave_way = False
        self._adopted = False
        self._is_short = False
        self._to_trace = options.active
        self._fits: StepsThatFit | None = None
        if options.max_trace_size is not None and options.active:
            self._fits = StepsThatFit(options, self._manifest.world_size, file.folder.parent.name)
        self._leaving: list[tuple[Part, TraceCapture | _MemoryCapture]] = []
        """What is still to be taken out of torch: it stopped inside an operator, or lost Kineto's session."""
        self._without_memory = not options.memory or not options.memory_steps or guard.is_off("memory")
        if guard.is_off("trace") or guard.is_off("profilers"):
            self._schedule.leave_out("traced")
        if guard.is_off("memory"):
            self._schedule.leave_out("memory")
        self._traced: list[int] = []
        self._root_steps = RootSteps()
        self._host = HostLoad()
        self._micro_batches: set[tuple[int, int | None]] = set()
        self._trace: TraceCapture | None = None
        self._memory: _MemoryCapture | None = None
        guard.when_off("host", self._host.stop)
        guard.when_off("trace", lambda: self._leave_out("traced"))
        guard.when_off("memory", lambda: self._leave_out("memory"))
        guard.when_off("profilers", self._leave_profiler)

    @property
    def kind(self) -> StepKind:
        """How the running step is captured; also ``traced`` if the training's own profiler covers it."""
        return "traced" if self._kind == "plain" and self._profiled else self._kind

    @property
    def is_recording_memory(self) -> bool:
        """Whether a recording of memory runs, which will be written when it ends."""
        return self._memory is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be captured."""
        return self._step >= self.end

    @property
    def end(self) -> int:
        """First step after all that is to be captured."""
        return self._schedule.end

    @property
    def is_whole(self) -> bool:
        """Whether everything was captured that was asked for."""
        if self._is_short:
            return False
        memory = self._without_memory or len(self._manifest.memory_steps) == self._options.memory_steps
        return memory and len(self._traced) == self._to_trace

    def advance(self, step: int) -> bool:
        """End the running step; ``step`` is the one that :meth:`begin_step` will begin.

        Returns whether one of the two is captured.
        """
        self._step, self._was_put_off = step, False
        was_captured = self._kind != "plain"
        self.give_way(step - 1)
        self._profiled = training_profilers.active
        return was_captured or self._schedule.kind(step) != "plain"

    def step_runs(self) -> None:
        """The step's own time begins: what is ours to do before it is done."""
        if self._kind != "plain":
            self._host.begin(traced=self._kind == "traced")

    def step_ran(self) -> None:
        """The step's own time is over; what is ours to do after it begins."""
        seen = self._host.end(self._step)
        if seen is not None:
            self._manifest.host_steps.append(seen)

    def end_step(self) -> None:
        """End the capture of the step before, and its recording where the next step is captured otherwise."""
        ended, begun = self._kind, self._schedule.kind(self._step)
        self._kind = "plain"
        if ended == "warmup" and self._trace is not None and self._trace.is_running:
            guard.run("trace", self._measure_step)
        if ended in ("traced", "memory"):
            guard.run("roots", self._count_micro_batches)
        if ended == "traced" and self._trace is not None:
            guard.run("trace", self._trace.end_step)
        if ended == "traced" and self._trace is not None:
            self._traced.append(self._step - 1)
            self._manifest.traced_steps, self._adopted = self._traced, False
        if ended == "memory" and self._memory is not None:
            self._manifest.memory_steps.append(self._step - 1)
        if begun != ended and ended in ("traced", "memory"):
            self.finish()
            self._settle()

    def begin_step(self) -> None:
        """Begin to capture the running step as the schedule says."""
        kind = self._schedule.kind(self._step)
        if kind != "plain" and training_profilers.active:
            self._put_off()
        elif kind == "memory" and self._memory is None:
            self._skip_memory_if_it_would_disturb()
        elif kind == "traced" and not self._traced:
            guard.run("trace", self._limit_trace)
        kind = self._schedule.kind(self._step)
        self._kind = kind
        guard.run("roots", self._roots.mark, kind in ("traced", "memory"))
        guard.run("roots", self._roots.end_step)
        if kind in ("warmup", "traced"):
            guard.run("trace", self._begin_traced_step, kind)
        elif kind == "memory":
            guard.run("memory", self._begin_memory_step)

    def begin_late(self) -> None:
        """Begin, with the first forward of a step, what was put off when the step began."""
        waits = self._was_put_off and self._kind == "plain" and not training_profilers.active
        if waits and self._schedule.bring_forward(self._step):
            self.begin_step()

    def give_way(self, step: int | None = None) -> None:
        """Make way for a profiler of the training's on another thread, which waits for it or has waited."""
        if self._kind != "plain" and (training_profilers.active or training_profilers.has_taken_over):
            self.make_way(step)

    def make_way(self, step: int | None = None) -> None:
        """End what is being captured, for the training's own profiler is about to begin.

        ``step`` is the one that is not captured: the running one, or where that has just ended, it.
        """
        self._profiled = True
        self.take_out()
        if self._kind == "plain":
            return
        trace, memory = self._trace, self._memory
        is_lost = trace is not None and training_profilers.has_taken_over
        if is_lost:
            self._traced.clear()
        keep = bool(self._traced if trace is not None else self._manifest.memory_steps)
        if keep:
            self.finish()
        else:
            self._trace = self._memory = None
            if trace is not None:
                self._stop("trace", trace, keep=False)
            if memory is not None:
                self._stop("memory", memory, keep=False)
        self._put_off(begun=True, keep=keep, step=step)
        self._kind = "plain"
        guard.clean("roots", self._roots.mark, False)
        self._file.write()

    def adopt(self, path: Path) -> None:
        """Take a trace that the training's own profiler wrote, if it was in the way and ours is not there."""
        if not self._options.active or not self._gave_way or self._adopted or self._traced:
            return
        self._manifest.traced_steps = adopt_trace(path, self._file.folder / TRACE_FILE)
        self._adopted = True
        self._file.write()

    def finish(self) -> None:
        """End the captures that run and write them."""
        guard.clean("host", self._host.stop)
        if (trace := self._trace) is not None:
            with self._pause("trace", [TRACE_FILE]):
                self._stop("trace", trace, keep=self._kind != "warmup")
            self._trace = None
            if trace.warning is not None:
                self._file.tell(trace.warning)
                guard.say(f"rank {self._manifest.rank}: {trace.warning}")
        memory, self._memory = self._memory, None
        if memory is not None:
            guard.run("description", self._file.describe_tensors, memory.address)
            with self._pause("memory", [SNAPSHOT_FILE, STORAGE_COUNT_FILE]):
                self._stop("memory", memory)
            if memory.lost is not None:
                self._file.tell(f"memory is not recorded: {memory.lost}")
                self._leave_out("memory")
            self._manifest.allocator_settings |= memory.allocator_settings
            stats = guard.run("description", devices.allocator_stats, self._manifest.device.type)
            self._manifest.allocator = stats or {}

    @contextmanager
    def _pause(self, kind: Literal["trace", "memory"], files: list[str]) -> Iterator[None]:
        """Record how long the training pauses in the block; the first rank logs it."""
        begun = time.monotonic_ns()
        yield
        paused = time.monotonic_ns() - begun
        found = [path.stat().st_size for name in files if (path := self._file.folder / name).is_file()]
        self._manifest.pauses.append(
            Pause(kind=kind, after_step=self._step - 1, duration_ns=paused, file_bytes=sum(found))
        )
        if paused >= SAID_FROM_NS and found and self._is_first:
            line = f"the training paused for {paused / 1e9:.1f} s while the {kind} recording was written"
            guard.say(f"rank {self._manifest.rank}: {line}")

    def abandon(self) -> None:
        """Stop what still records, keep what can be written of it, and capture nothing more."""
        self._leave_out("traced")
        self._leave_out("memory")

    def _leave_profiler(self) -> None:
        """Trace no more; torch's profiler is left at once, unless it is in the middle of a call of ours."""
        if training_profilers.is_aside:
            self._schedule.leave_out("traced")
            self._is_short = True
        else:
            self._leave_out("traced")

    def _leave_out(self, kind: Literal["traced", "memory"]) -> None:
        """Stop one of the captures for good."""
        self._schedule.leave_out(kind)
        keep = self._kind != "warmup"
        if self._kind == kind or (self._kind == "warmup" and kind == "traced"):
            self._kind = "plain"
            guard.clean("roots", self._roots.mark, False)
        if kind == "traced":
            self._abstain()
            trace, self._trace = self._trace, None
            if trace is not None:
                self._stop("trace", trace, keep=keep)
        else:
            memory, self._memory = self._memory, None
            if memory is not None:
                self._stop("memory", memory)
        self._is_short = True
        files = [TRACE_FILE] if kind == "traced" else [SNAPSHOT_FILE, STORAGE_COUNT_FILE]
        if any((self._file.folder / name).is_file() for name in files):
            return
        if kind == "traced":
            self._manifest.traced_steps = []
        else:
            self._manifest.memory_steps = []

    def forget(self) -> None:
        """In a forked child: leave the captures to the parent, whose they are."""
        memory, self._memory, self._trace = self._memory, None, None
        self._host.stop()
        if memory is not None:
            memory.forget()

    def shortfall(self) -> str:
        """Say how much of the schedule was captured."""
        parts = (
            [f"{len(self._traced)} of {self._options.active} traced steps"] if self._options.active else []
        )
        if not self._without_memory:
            memory = len(self._manifest.memory_steps)
            parts.append(f"{memory} of {self._options.memory_steps} memory steps")
        return " and ".join(parts)

    def told_of_profiler(self) -> str | None:
        """Say what became of the schedule if the training's own profiler was in its way."""
        if not self._gave_way:
            return None
        if self._adopted:
            steps = _listed(self._manifest.traced_steps)
            outcome = f"left no gap; {TRACE_FILE} is the first trace it wrote{steps and ', '}{steps}"
        elif self._traced:
            outcome = f"had priority; the recorder traced {_listed(self._traced)}"
        elif self._options.active:
            outcome = "left no gap and wrote no Chrome trace to use instead"
        else:
            outcome = "had priority"
        if not self._without_memory:
            memory = self._manifest.memory_steps
            outcome += (
                f"; memory was recorded in {_listed(memory)}"
                if memory
                else "; no gap for the memory recording either"
            )
        slows = "" if self._traced else "; it slows every step that it covers: remove it when not needed"
        return f"the training's own profiler {outcome}{slows}"

    def _measure_step(self) -> None:
        """Measure the trace of the step that has ended, and say how many such steps fit."""
        trace, self._trace = self._trace, None
        if trace is None or self._fits is None:
            return
        try:
            with self._pause("trace", []):
                self._fits.measured(trace.measure())
        except Exception:
            self._stop("trace", trace, keep=False)
            raise

    def _limit_trace(self) -> None:
        """Trace no more steps than fit on every rank."""
        if self._fits is None or (step_bytes := self._fits.step_bytes) is None:
            return
        fits = self._fits.agreed()
        if fits == self._to_trace:
            return
        self._schedule.shorten(fits)
        self._to_trace = fits
        counted, limit = f"{fits} of {self._options.active} steps traced", self._options.max_trace_size
        line = f"{counted}: --max-trace-size is {limit}, and a step takes {format_bytes(step_bytes)}"
        self._file.tell(line)
        if self._is_first:
            guard.say(f"rank {self._manifest.rank}: {line}")
        trace = self._trace
        if not fits and trace is not None:
            self._trace = None
            self._stop("trace", trace, keep=False)

    def _abstain(self) -> None:
        if self._fits is not None:
            guard.clean("trace", self._fits.abstain)

    def _stop(self, part: Part, capture: TraceCapture | _MemoryCapture, *, keep: bool = True) -> None:
        """Stop a capture; again where that fails, since nothing of ours may stay in torch."""
        guard.clean(part, capture.finish if keep else capture.discard)
        self._leaving.append((part, capture))
        self.take_out()

    def inherit(self, other: Captures) -> None:
        """Take over what is still to be taken out of torch."""
        other._leaving, self._leaving = [], [*self._leaving, *other._leaving]

    def take_out(self) -> None:
        """Take out of torch what could not be before; also where the captures have failed."""
        leaving, self._leaving = self._leaving, []
        self._leaving += [one for one in leaving if guard.clean(one[0], one[1].discard) is False]

    def _begin_traced_step(self, kind: StepKind) -> None:
        if self._trace is None:
            self._trace = TraceCapture(self._file.folder / TRACE_FILE, self._options)
            if (device := self._file.device_type) not in ("cpu", "cuda"):
                self._file.tell(f"the trace holds only the host's work: {device} devices are not recorded")
            guard.run("description", self._file.describe)
        is_measured = self._fits is not None and self._schedule.is_measured(self._step)
        only_prepare = kind == "warmup" and not is_measured
        begun = self._trace.prepare() if only_prepare else self._trace.begin_step(self._step)
        if not begun:  # the training's own profiler began on another thread, at this moment
            self._trace = None
            self._put_off(begun=True)
            self._kind = "plain"

    def _begin_memory_step(self) -> None:
        if self._memory is None:
            self._memory = memory_capture(
                self._file.folder,
                self._file.device_type,
                roots=len(list(self._roots)),
                stacks=self._options.stacks,
            )
            self._manifest.memory_source = self._memory.source
            guard.run("description", self._file.describe)
            self._memory.begin_step(self._step)
            guard.run("description", self._file.describe_tensors, self._memory.address)
        else:
            self._memory.begin_step(self._step)

    def _put_off(self, *, begun: bool = False, keep: bool = False, step: int | None = None) -> None:
        self._schedule.put_off(self._step if step is None else step, begun=begun, keep=keep)
        self._was_put_off = self._gave_way = True
        self._abstain()

    def _skip_memory_if_it_would_disturb(self) -> None:
        reason = why_not(self._file.device_type)
        if reason is not None:
            self._without_memory = True
            self._schedule.put_off(self._step, begun=True, keep=True)
            self._file.tell(f"memory is not recorded: {reason}")
            self._settle()

    def _settle(self) -> None:
        if self.is_over and self.is_whole:
            self._manifest.state = "complete"
        self._file.write()

    def _count_micro_batches(self) -> None:
        counts = self._roots.end_step()
        self._root_steps.add(counts)
        self._manifest.roots = self._root_steps.describe()
        self._micro_batches |= {
            (one.micro_batches, one.gradient_syncs) for one in counts.values() if one.forwards
        }
        same = next(iter(self._micro_batches)) if len(self._micro_batches) == 1 else (None, None)
        self._manifest.micro_batches, self._manifest.gradient_syncs = same
        add_forward_order(self._manifest.param_groups, self._roots)
        self._root_steps.describe_groups(self._manifest.param_groups)


def _listed(steps: list[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}" if steps else ""
