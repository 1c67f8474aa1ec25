"""The Kineto trace of the recorded steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from isal import igzip
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from fsdp2prof.files import replacing, scratch
from fsdp2prof.manifest import RecordOptions

__all__ = ["TraceCapture"]

_CHUNK_BYTES = 1 << 22
_OTHER_PROFILER = "the training runs a profiler of its own then; choose other steps with --start-step"


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
        self._profiler = _KinetoProfile(
            activities=activities, record_shapes=options.shapes, with_stack=options.stacks
        )
        self._prepared = False
        self._running = False
        self._step: record_function | None = None

    def prepare(self) -> None:
        """Set the profiler up, one step or more before it records.

        Raises ``RuntimeError`` if the training profiles itself now: torch has one profiler, and starting a
        second silently empties the first.
        """
        if not self._running and _profiler_enabled():
            raise RuntimeError(_OTHER_PROFILER)
        if not self._prepared:
            self._profiler.prepare_trace()
            self._prepared = True

    def begin_step(self, step: int) -> None:
        """Begin a traced step, starting the trace with the first."""
        self.prepare()
        if not self._running:
            self._profiler.start_trace()
            self._running = True
        self._step = record_function(f"ProfilerStep#{step}")
        self._step.__enter__()  # type: ignore[no-untyped-call]

    def end_step(self) -> None:
        """End the running step's range."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def finish(self) -> None:
        """Stop and, if anything was traced, write the trace. A step that still runs is cut here.

        Raises ``RuntimeError`` if the training's own profiler took over meanwhile.
        """
        self.end_step()
        if not self._prepared:
            return
        if self._running and not _profiler_enabled():
            raise RuntimeError(_OTHER_PROFILER)
        if not self._running:
            self._profiler.start_trace()  # a prepared profiler can only be stopped through a start
        self._profiler.stop_trace()
        if self._running:
            self._export()
        self._prepared = self._running = False

    def _export(self) -> None:
        with scratch(self._path.with_suffix("")) as text, replacing(self._path) as compressed:
            self._profiler.export_chrome_trace(str(text))
            with text.open("rb") as source, igzip.open(compressed, "wb", compresslevel=1) as target:  # type: ignore[no-untyped-call]
                shutil.copyfileobj(source, target, _CHUNK_BYTES)
