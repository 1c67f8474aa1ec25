"""One rank's recording: its training steps, what is captured at their boundaries, and how it ends."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from fsdp2prof.manifest import RecordingInfo, RecordOptions, StepInfo
from fsdp2prof.recorder.guard import guard
from fsdp2prof.recorder.hanging import HangWatch, keep_state
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.memory.history import OomDump, why_no_history
from fsdp2prof.recorder.model.roots import Roots
from fsdp2prof.recorder.rank.captures import Captures
from fsdp2prof.recorder.rank.manifest import ManifestFile
from fsdp2prof.recorder.rank.recordings import Recordings, Summaries
from fsdp2prof.recorder.rank.stepping import OptimizerWatch, TrainingSteps, UnseenUpdates
from fsdp2prof.recorder.rank.training_profilers import training_profilers
from fsdp2prof.recorder.rank.trials import Trials
from fsdp2prof.recorder.rank.watching import StepLines
from fsdp2prof.recorder.settings import Settings, records_again
from fsdp2prof.run_directory import (
    ERRORS_FILE,
    FLIGHT_RECORDER_FILE,
    FLIGHT_RECORDER_FOLDER,
    SNAPSHOT_FILE,
    STACKS_FILE,
    STEPS_FILE,
    STORAGE_COUNT_FILE,
    SUMMARY_FILE,
    TRACE_FILE,
    TRIAL_FILE,
)

_LEFT_BY_A_RANK = (
    TRACE_FILE,
    SNAPSHOT_FILE,
    STORAGE_COUNT_FILE,
    SUMMARY_FILE,
    STEPS_FILE,
    FLIGHT_RECORDER_FILE,
    STACKS_FILE,
    TRIAL_FILE,
)

MAX_STEPS = 10_000
"""Training steps whose wall time is kept."""


class RankSession:
    """Records one rank. Inert in forked children and after the end; a rank that was not selected only watches
    for hangs, where it is to.

    ``automatic`` takes the step boundaries from the optimizers (:class:`TrainingSteps`); else the owner calls
    :meth:`step`.
    """

    def __init__(self, settings: Settings, identity: Identity, *, automatic: bool) -> None:
        self._automatic = automatic
        self._active = self._ended = False
        self._step = 0
        self._step_start_ns = -1
        self._thread = threading.get_ident()
        """That trains."""
        self._kept_in_step = -1
        self._keeping = threading.RLock()  # a signal may come to the thread that keeps it
        self._forward_began = False
        self._oom: OomDump | None = None
        self._trials: Trials | None = None
        self._steps = TrainingSteps(self.step)
        self._updates = UnseenUpdates()
        self._watch = OptimizerWatch(self._optimizer_stepped)
        self._roots = Roots(self._forward)
        self._file = ManifestFile(settings, identity, self._roots, self._watch)
        self.manifest, self.folder = self._file.manifest, self._file.folder
        guard.run("recording", (self.folder / ERRORS_FILE).unlink, missing_ok=True)  # of a restarted attempt
        guard.start(self.folder / ERRORS_FILE, self.tell, lambda: self._step if self._begun else -1)
        guard.when_off("recording", self._stop)
        guard.when_off("ending", self._mark_partial)
        options = settings.options if self.manifest.selected else _of_a_rank_left_out(settings.options)
        self._summaries: Summaries | None = None
        if options.summary:
            self._summaries = guard.run("summary", Summaries, settings, launched=automatic)
        self._lines: StepLines | None = guard.run("watch", StepLines, self.folder) if options.watch else None
        self._hang: HangWatch | None = None
        if options.hang_after is not None:
            self._hang = guard.run("hang", HangWatch, options.hang_after, self._hung)
        self._recordings: Recordings | None = None
        if records_again(options):
            self._recordings = Recordings(
                settings, identity, self._roots, self._watch, self._file, self._summaries
            )
            self._captures = self._recordings.current
        else:
            self._captures = Captures(self._file, options, self._roots)
        self._trials = guard.run("trial", self._trials_of, settings, identity)
        guard.when_off("captures", self._abandon_captures)
        guard.when_off("watch", self._end_lines)
        guard.when_off("hang", self._close_hang)
        guard.when_off("trial", self._abandon_trials)

    def begin(self) -> None:
        """Leave the sign of life and start watching, in a rank that is not selected for hangs alone."""
        for folder in (self.folder, self.folder.parent / FLIGHT_RECORDER_FOLDER):
            folder.mkdir(parents=True, exist_ok=True)
        for name in _LEFT_BY_A_RANK:  # of an attempt that was restarted
            (self.folder / name).unlink(missing_ok=True)
        self.write_manifest()
        self._active = self.manifest.selected or self._hang is not None or self._trials is not None
        if self._active and self._recordings is not None:
            guard.run("captures", self._recordings.listen)
        if self._active:
            self._watch.install()
            guard.run("profilers", training_profilers.install)
            training_profilers.listener = self
        else:
            guard.run("profilers", training_profilers.remove)

    def watch(self, module: nn.Module) -> None:
        """Watch a module that ``fully_shard`` was applied to."""
        if self._active:
            self._roots.watch(module)

    def take_over(self) -> None:
        """Take the step boundaries from the caller from now on; step 0 begins unless one is running."""
        self._automatic = False
        if self._alive() and self._step_start_ns < 0:
            self.begin_first_step()

    def step(self) -> None:
        """End the running training step and begin the next."""
        guard.run("recording", self._end_step)

    def _end_step(self) -> None:
        if not self._alive():
            return
        now = time.time_ns()
        guard.clean("captures", self._captures.take_out)
        guard.run("host", self._captures.step_ran)
        ended = self._keep_duration(now)
        self._step += 1
        if self._hang is not None:
            guard.run("hang", self._hang.step)
        captured = guard.run("captures", self._captures.advance, self._step)
        if captured:
            guard.run("captures", self._captures.end_step)
        if self._trials is not None:
            guard.run("trial", self._trials.step, ended)
        captured = self._choose_recording() or captured
        self._forward_began = False
        if self._step == 1:
            guard.run("description", self._file.describe_first)
            guard.run("watch", self._begin_lines)
        elif self._step == 2:
            guard.run("description", self._file.describe_settled)
        if captured:
            guard.run("captures", self._captures.begin_step)
            if self._recordings is None and self._captures.is_over:
                self._summarise()
        guard.run("host", self._captures.step_runs)
        self._step_start_ns = time.time_ns()

    def begin_first_step(self) -> None:
        """Begin step 0; the first root forward does it where step boundaries are automatic."""
        guard.run("oom", self._watch_memory)
        self._step_start_ns = time.time_ns()
        self._thread = threading.get_ident()
        if self._hang is not None:
            guard.run("hang", self._hang.step)
        if not self._choose_recording():
            guard.run("captures", self._captures.advance, 0)
        guard.run("captures", self._captures.begin_step)
        guard.run("host", self._captures.step_runs)

    def end(self, error: str | None = None, *, crashed: bool = False) -> None:
        """End the recording, now or never: write what was captured and say in which state it is."""
        if not self._alive():
            if self.manifest.pid == os.getpid() and not self._ended:
                self._ended = True
                self._finish_manifest(error, crashed)
            return
        self._ended = True
        self._close_hang()
        guard.run("recording", self._steps.finish)
        if self._trials is not None:
            guard.run("trial", self._trials.close)
        guard.clean("captures", self._captures.take_out)
        guard.run("captures", self._captures.give_way)
        over, whole = self._captures.is_over, self._captures.is_whole
        guard.run("captures", self._captures.finish)
        self._stop_watching()
        self._active = False
        if (told := self._captures.told_of_profiler()) is not None:
            self.tell(told)
        if self._recordings is not None:
            guard.run("captures", self._recordings.close, whole=over and whole)
            self._finish_manifest(error, crashed)
            return
        if not over and self._step == 0 and self._automatic and not error:
            self.tell(self._why_no_step())
        elif not over:
            ran = f"only {self._step} of {self._captures.end} steps ran"
            self.tell(f"schedule incomplete: {ran}; captured: {self._captures.shortfall()}")
        self._finish_manifest(error, crashed, whole)
        self._summarise()

    def forget(self) -> None:
        """In a forked child: nothing is watched and nothing counted any more.

        Freeing a CUDA event would abort the child, also when its interpreter ends.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        self._active = False
        guard.clean("captures", self._captures.forget)
        self._close_hang()
        if self._lines is not None:
            guard.clean("watch", self._lines.forget)
        self._remove_watches()

    def _summarise(self) -> None:
        if self._summaries is not None:
            guard.run("summary", self._summaries.begin, self.folder)

    @property
    def to_summarise(self) -> list[Path]:
        """Folders that no launcher summarises."""
        return [] if self._summaries is None else self._summaries.waiting

    def _choose_recording(self) -> bool:
        """Take up the recording that begins with this step, if there is one: whether its captures began."""
        before = self._captures
        if self._recordings is not None:
            guard.run("captures", self._recordings.next_step, self._step)
            self._captures = self._recordings.current
        return self._captures is not before and bool(
            guard.run("captures", self._captures.advance, self._step)
        )

    def keep_state(self, why: str, crash: TracebackType | None = None) -> None:
        """Keep this rank's last collectives and its threads' stacks, for ``analyze hang``.

        The first state of a step stays: a timeout, or peers that end, get a rank out of where it hung.
        """
        with self._keeping:
            if self._ended or self._kept_in_step == self._step:
                return
            self._kept_in_step = self._step
            try:
                kept = keep_state(self.folder, why, crash)
            except Exception as error:  # whatever torch's recorder raises where a rank is about to end
                self.tell(f"{why}: its state could not be saved: {_reason(error)}")
                return
        if crash is None:
            self.tell(f"{why}: its state is in {' and '.join(kept)}")

    def _hung(self, waited_s: float) -> None:
        if self._alive():
            self.keep_state(f"no step ended for {waited_s:.0f} s after step {self._step} began")

    def tell(self, message: str) -> None:
        """Keep a message for the person who reads the run."""
        self._file.tell(message)

    def write_manifest(self) -> None:
        """Write the manifest as it is."""
        self._file.write()

    def profiler_begins(self) -> None:
        """Make way for a profiler of the training's own."""
        if self._alive() and self._step_start_ns >= 0 and threading.get_ident() == self._thread:
            guard.run("captures", self._captures.make_way)

    def trace_exported(self, path: Path) -> None:
        """Take the trace that the training's own profiler wrote, if ours is not to be had."""
        if self._alive():
            guard.run("captures", self._captures.adopt, path)

    @property
    def _begun(self) -> bool:
        return self._step_start_ns >= 0

    @property
    def _stays(self) -> bool:
        """Whether it watches every step of the training, however many."""
        return any(one is not None for one in (self._recordings, self._lines, self._hang))

    def _trials_of(self, settings: Settings, identity: Identity) -> Trials | None:
        """The trial, on every rank: those that are not selected change settings with the others."""
        if settings.options.trial is None:
            return None
        recordings = self._recordings

        def record(plan: RecordingInfo, traced: int) -> None:
            if recordings is not None:
                guard.run("captures", recordings.begin, plan, traced)

        def recorded() -> None:
            if recordings is not None:
                guard.clean("captures", recordings.end)

        return Trials(
            settings.options.trial,
            identity,
            self._roots,
            self.folder,
            record=record,
            recorded=recorded,
            tell=self.tell,
        )

    def _alive(self) -> bool:
        return self._active and self.manifest.pid == os.getpid()

    def _forward(self) -> None:
        if not self._alive():
            return
        if self._automatic and not self._watch.optimizers:
            guard.run("recording", self._end_own_update)
        if self._automatic and self._step_start_ns < 0:
            self.begin_first_step()
        guard.run("captures", self._captures.give_way)
        if not self._forward_began:
            self._forward_began = True
            guard.run("captures", self._captures.begin_late)
        if self._automatic:
            self._steps.forward()
        if self._trials is not None:
            guard.run("trial", self._trials.forward)

    def _end_own_update(self) -> None:
        for root in self._roots:
            if (trained := root.trained_parameter()) is not None:
                reduced = bool(root.counts.gradient_syncs)
                if self._updates.since_last_forward(trained, reduced=reduced):
                    self._steps.optimizer_stepped(in_backward=False)
                return

    def _optimizer_stepped(self, in_backward: bool) -> None:
        if self._automatic and self._alive():
            self._steps.optimizer_stepped(in_backward=in_backward)

    def _why_no_step(self) -> str:
        if self._step_start_ns < 0:
            return "nothing was recorded: no sharded model ran forward with gradients"
        return (
            "nothing was recorded: no optimizer stepped after a forward, so no training step ended; "
            "in a custom loop, call step() of an fsdp2prof.Recorder at the end of each step"
        )

    def _keep_duration(self, now: int) -> StepInfo:
        if self._step_start_ns < 0:
            self._step_start_ns = now
        start = self._step_start_ns
        ended = StepInfo(step=self._step, start_ns=start, duration_ns=now - start, kind=self._captures.kind)
        if self._lines is not None:
            guard.run("watch", self._lines.end_step, ended)
        if self._recordings is not None:
            guard.run("captures", self._recordings.keep, ended)
        if len(self.manifest.steps) < MAX_STEPS:
            self.manifest.steps.append(ended)
        elif not self._stays and self._captures.is_over:
            self._stop_watching()
        return ended

    def _out_of_memory(self, file: str) -> None:
        self.manifest.memory_source = self.manifest.memory_source or "cuda_snapshot"
        self.tell(f"out of memory in step {self._step}: the allocator's state is in {file}")
        self.write_manifest()

    def _watch_memory(self) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        if why_no_history() is not None:  # said where memory is to be recorded
            return
        try:
            self._oom = OomDump(self.folder, self._out_of_memory, lambda: self._captures.is_recording_memory)
        except (AttributeError, RuntimeError) as error:
            self.tell(f"an out-of-memory error will leave no snapshot: {_reason(error)}")

    def _stop(self) -> None:
        """Stop for good: the recording failed, and the manifest says so."""
        self._abandon_trials()
        self._abandon_captures()
        self._stop_watching()
        self._active = False

    def _abandon_trials(self) -> None:
        if self._trials is not None:
            guard.clean("trial", self._trials.abandon)

    def _abandon_captures(self) -> None:
        self._captures.abandon()
        if self._recordings is not None:
            guard.clean("captures", self._recordings.close, whole=False)
        self._mark_partial()

    def _mark_partial(self) -> None:
        self.manifest.state = "partial"
        self.write_manifest()

    def _begin_lines(self) -> None:
        if self._lines is not None:
            blocking = not any(group.unshard_async_op for group in self.manifest.param_groups)
            self._lines.begin(self._file.device_type, blocking=blocking)

    def _close_hang(self) -> None:
        if self._hang is not None:
            guard.clean("hang", self._hang.close)

    def _end_lines(self) -> None:
        if self._lines is not None:
            guard.clean("watch", self._lines.end)

    def _stop_watching(self) -> None:
        self._close_hang()
        self._end_lines()
        self._remove_watches()

    def _remove_watches(self) -> None:
        guard.clean("roots", self._roots.remove)
        guard.clean("recording", self._watch.remove)
        guard.clean("profilers", training_profilers.remove)

    def _finish_manifest(self, error: str | None, crashed: bool, complete: bool = True) -> None:
        manifest = self.manifest
        if crashed:
            manifest.state = "crashed"
        elif manifest.state == "running":
            manifest.state = "complete" if complete else "partial"
        manifest.error = error
        self.write_manifest()


def _of_a_rank_left_out(options: RecordOptions) -> RecordOptions:
    """What is watched in a rank that was not selected: a hang is every rank's."""
    return RecordOptions(active=0, memory=False, hang_after=options.hang_after)


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
