"""The Kineto trace of the recorded steps."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.profiler.profiler as profiler_module
from isal import igzip
from torch.autograd import _disable_profiler, _profiler_enabled
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from fsdp2prof.errors import Fsdp2ProfError
from fsdp2prof.files import replacing, scratch_prefix
from fsdp2prof.manifest import RecordOptions
from fsdp2prof.readers.trace.launch_counts import count_launches
from fsdp2prof.recorder.model.roots import Range
from fsdp2prof.recorder.rank.training_profilers import training_profilers
from fsdp2prof.run_directory import TRACE_FILE

_CHUNK_BYTES = 1 << 22
_MOST_MISSING = 0.01
"""Share of launches that may leave no record of the device; an analysis leaves steps with more out."""
_STEP = re.compile(rb'"ProfilerStep#(\d+)"')
_LONGEST_STEP_BYTES = 40


_used = False


def kineto_is_used() -> bool:
    """Return whether this process has ever set up a profiler for the recorder."""
    return _used


class TraceCapture:
    """One profiling cycle: prepared in the warm-up, started, a range per step, stopped and exported at once.

    The step ranges carry the training step's own number, ``ProfilerStep#N``, as ``torch.profiler.profile``
    would name them. Export happens where the cycle ends: kept for later it would be emptied by another cycle.
    """

    def __init__(self, path: Path, options: RecordOptions) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._path = path
        self._on_device = len(activities) > 1
        self.warning: str | None = None
        """What is wrong with the trace that was written."""
        self._profiler = _KinetoProfile(
            activities=activities, record_shapes=options.shapes, with_stack=options.stacks
        )
        self._prepared = False
        self._running = False
        self._thread = 0
        """That it was started on: it can be stopped on no other."""
        self._step: Range | None = None

    def prepare(self) -> bool:
        """Set the profiler up, one step or more before it records; False where the training has it."""
        global _used
        if not self._prepared:
            if not training_profilers.claim():
                return False
            _used = True
            try:
                with training_profilers.set_aside(), _quietly():
                    self._profiler.prepare_trace()
                    self._prepared = True
            finally:
                if not self._prepared:
                    training_profilers.release()
        return True

    def begin_step(self, step: int) -> bool:
        """Begin a traced step, starting the trace with the first; False where :meth:`prepare` is."""
        if not self.prepare():
            return False
        if not self._running:
            self._start()
        self._step = Range(f"ProfilerStep#{step}")
        return True

    def end_step(self) -> None:
        """End the running step's range."""
        step, self._step = self._step, None
        if step is not None:
            step.close()

    @property
    def is_running(self) -> bool:
        """Whether a step has been traced, or is."""
        return self._running

    def finish(self) -> None:
        """Stop and, if anything was traced, write the trace. A step that still runs is cut here.

        Nothing is written of a session that the training's profiler took over.
        """
        was_running = self._running
        is_lost = training_profilers.has_taken_over
        if not self.discard() and not is_lost:
            raise RuntimeError("it can only be stopped on the thread that it was started on")
        if was_running and not is_lost:
            self._export(self._path)

    def measure(self) -> int:
        """Stop, and return the bytes that the file would have."""
        if training_profilers.has_taken_over or not self.discard():
            raise RuntimeError("the training's own profiler took over the session")
        with tempfile.TemporaryDirectory(prefix=scratch_prefix(os.getpid())) as folder:
            path = Path(folder, TRACE_FILE)
            self._export(path)
            return path.stat().st_size

    def _export(self, path: Path) -> None:
        """Write the raw trace on the node's own disk (``$TMPDIR``), and only compressed into the run."""
        with (
            tempfile.TemporaryDirectory(prefix=scratch_prefix(os.getpid())) as folder,
            training_profilers.set_aside(),
        ):
            text = Path(folder, TRACE_FILE).with_suffix("")
            self._profiler.export_chrome_trace(str(text))
            if text.with_name(f"{text.name}.tmp").exists():  # where Kineto writes first
                raise OSError(f"no room for the raw trace in {folder}; point TMPDIR to a larger disk")
            if self._on_device:
                self.warning = _missing_records(text)
            _compress(text, path)

    def discard(self) -> bool:
        """Stop and write nothing. Safe to call again after a failure: torch's profiler must be left free.

        Returns False where it cannot be stopped yet: before a profiler of the training's, which took its
        session, or on another thread.
        """
        if not self._prepared:
            return True
        is_elsewhere = self._running and self._thread != threading.get_ident()
        if is_elsewhere or not training_profilers.leave():
            return False
        self.end_step()
        try:
            if self._running or not training_profilers.has_taken_over:
                self._stop()
            self._prepared = self._running = False
        finally:
            training_profilers.release()
        return True

    def _stop(self) -> None:
        if not self._running:
            self._start()  # a prepared profiler can only be stopped through a start
        with training_profilers.set_aside(), _quietly():
            try:
                if training_profilers.has_taken_over:  # Kineto crashes where it has no session to stop
                    self._profiler.prepare_trace()
                self._profiler.stop_trace()
            finally:
                if _profiler_enabled():  # a torch whose profiler is stopped in another way
                    _disable_profiler()

    def _start(self) -> None:
        with training_profilers.set_aside():
            self._thread = threading.get_ident()
            try:
                self._profiler.start_trace()
                self._running = True
            except BaseException:  # once torch's profiler runs: started again, that would crash
                self._running = bool(_profiler_enabled())
                raise
            self._profiler.add_metadata_json("torch_version", json.dumps(torch.__version__))


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep torch's warning about cycles of a profiler, of which ours has one, out of the training's output.

    Not by a filter of warnings: changing those makes Python show others again that it had shown before.
    """
    names = ("warn", "_warn_once")
    originals = {name: getattr(profiler_module, name) for name in names if hasattr(profiler_module, name)}
    for name, original in originals.items():
        setattr(profiler_module, name, _without_cycles(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(profiler_module, name, original)


def _without_cycles(warn: Callable[..., None]) -> Callable[..., None]:
    def quiet(message: object, *args: Any, **kwargs: Any) -> None:
        if "clears events at the end of each cycle" not in str(message):
            warn(message, *args, **kwargs)

    return quiet


def _missing_records(trace: Path) -> str | None:
    """Say whether the profiler lost records of the device; an analysis of such a trace says little."""
    try:
        launches, missing = count_launches(trace)
    except Fsdp2ProfError:
        return None
    if missing <= _MOST_MISSING * launches:
        return None
    return (
        f"{missing:,} of {launches:,} launches in the trace have no device record: the profiler lost "
        "them; record again, fewer steps at a time"
    )


def adopt_trace(source: Path, target: Path) -> list[int]:
    """Copy a Chrome trace, compressed or not; returns the numbers of the ``ProfilerStep#N`` in it."""
    with source.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    if compressed:
        with replacing(target) as temporary:
            shutil.copyfile(source, temporary)
    else:
        _compress(source, target)
    steps: set[int] = set()
    before = b""
    with igzip.open(target, "rb") as trace:  # type: ignore[no-untyped-call]
        while piece := trace.read(_CHUNK_BYTES):
            steps.update(int(number) for number in _STEP.findall(before + piece))
            before = piece[-_LONGEST_STEP_BYTES:]
    return sorted(steps)


def _compress(source: Path, target: Path) -> None:
    with (
        replacing(target) as temporary,
        source.open("rb") as text,
        igzip.open(temporary, "wb", compresslevel=1) as compressed,  # type: ignore[no-untyped-call]
    ):
        shutil.copyfileobj(text, compressed, _CHUNK_BYTES)
