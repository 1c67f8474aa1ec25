"""One rank's recording: what happens at the boundary of each training step, and what its manifest says."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp2prof.files import write_json
from fsdp2prof.manifest import (
    MANIFEST_FILE,
    SNAPSHOT_FILE,
    STORAGE_COUNT_FILE,
    TRACE_FILE,
    RankManifest,
    StepInfo,
    rank_folder,
)
from fsdp2prof.recorder import describe
from fsdp2prof.recorder import devices as environment
from fsdp2prof.recorder.environment_variables import relevant_environment
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.memory_history import MemoryCapture, OomDump, memory_capture
from fsdp2prof.recorder.roots import Roots
from fsdp2prof.recorder.settings import Schedule, Settings, is_selected
from fsdp2prof.recorder.stepping import OptimizerWatch, TrainingSteps
from fsdp2prof.recorder.tracing import TraceCapture

__all__ = ["RankSession"]

MAX_STEPS = 10_000
"""Training steps whose wall time is kept."""


class RankSession:
    """Records one rank. Inert in forked children, in ranks that were not selected, and after the end.

    ``automatic`` takes the step boundaries from the optimizers (:class:`TrainingSteps`); else the owner calls
    :meth:`step`.
    """

    def __init__(self, settings: Settings, identity: Identity, *, automatic: bool) -> None:
        options = settings.options
        self.folder = settings.path / rank_folder(identity.rank)
        self.manifest = RankManifest(
            rank=identity.rank,
            local_rank=identity.local_rank,
            world_size=identity.world_size,
            node_rank=settings.node_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            script=list(sys.argv),
            selected=is_selected(options.ranks, identity.rank, identity.world_size),
            versions=environment.package_versions(),
            environment=relevant_environment(),
        )
        self._options = options
        self._schedule = Schedule.of(options)
        self._automatic = automatic
        self._active = self._ended = False
        self._busy = False
        self._postponed: Callable[[], None] | None = None
        self._step = 0
        self._step_start_ns = -1
        self._micro_batches: set[tuple[int, int]] = set()
        self._trace: TraceCapture | None = None
        self._memory: MemoryCapture | None = None
        self._oom: OomDump | None = None
        self._steps = TrainingSteps(self.step)
        self._watch = OptimizerWatch(self._optimizer_stepped)
        self._roots = Roots(self._forward)

    def begin(self) -> None:
        """Leave the sign of life and, in a selected rank, start watching."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (TRACE_FILE, SNAPSHOT_FILE, STORAGE_COUNT_FILE):  # of an attempt that was restarted
            (self.folder / name).unlink(missing_ok=True)
        self.write_manifest()
        self._active = self.manifest.selected
        if self._active:
            self._watch.install()

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
        if not self._alive():
            return
        now = time.time_ns()
        ended, begun = self._schedule.kind(self._step), self._schedule.kind(self._step + 1)
        if self._step_start_ns < 0:
            self._step_start_ns = now
        if len(self.manifest.steps) < MAX_STEPS:
            duration = now - self._step_start_ns
            start = self._step_start_ns
            self.manifest.steps.append(
                StepInfo(step=self._step, start_ns=start, duration_ns=duration, kind=ended)
            )
        elif self._schedule_is_over():
            self._stop_watching()
        self._step += 1
        if self._step == 1:
            self._guard(self._describe)
        if ended != "plain" or begun != "plain":
            self._guard(self._end_captured_step, ended, begun)
            if self._active:
                self._guard(self._begin_captured_step, begun)
        self._step_start_ns = time.time_ns()

    def begin_first_step(self) -> None:
        """Begin step 0; the first root forward does it where step boundaries are automatic."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._oom = OomDump(self.folder, self._out_of_memory)
        self._step_start_ns = time.time_ns()
        self._guard(self._begin_captured_step, self._schedule.kind(0))

    def end(self, error: str | None = None, *, crashed: bool = False) -> None:
        """End the recording, now or never: write what was captured and say in which state it is."""
        if not self._alive():
            if self.manifest.pid == os.getpid() and not self._ended:
                self._ended = True
                self._finish_manifest(error, crashed)
            return
        self._ended = True
        self._steps.finish()
        complete = self._schedule_is_over()
        self._guard(self._finish_captures)
        self._stop_watching()
        self._active = False
        if not complete:
            self.manifest.messages.append(self._cut_short())
        self._finish_manifest(error, crashed, complete)

    def tell(self, message: str) -> None:
        """Keep a message for the person who reads the run."""
        if message not in self.manifest.messages:
            self.manifest.messages.append(message)

    def when_idle(self, action: Callable[[], None]) -> None:
        """Run ``action`` now, or when the file that is being written is whole."""
        if self._busy:
            self._postponed = action
        else:
            action()

    def write_manifest(self) -> None:
        """Write the manifest as it is; a disk that takes no more is no reason to stop the training."""
        try:
            write_json(self.folder / MANIFEST_FILE, self.manifest)
        except OSError as error:
            print(f"fsdp2prof: {self.folder / MANIFEST_FILE} cannot be written ({error})", file=sys.stderr)  # noqa: T201

    def _alive(self) -> bool:
        return self._active and self.manifest.pid == os.getpid()

    def _schedule_is_over(self) -> bool:
        return self._step >= self._schedule.end

    def _forward(self) -> None:
        if self._automatic and self._alive():
            if self._step_start_ns < 0:
                self.begin_first_step()
            self._steps.forward()

    def _optimizer_stepped(self, in_backward: bool) -> None:
        if self._automatic and self._alive():
            self._steps.optimizer_stepped(in_backward=in_backward)

    def _end_captured_step(self, ended: str, begun: str) -> None:
        if ended in ("traced", "memory"):
            self._micro_batches |= self._roots.micro_batches()
            if len(self._micro_batches) == 1:
                self.manifest.micro_batches, self.manifest.gradient_syncs = next(iter(self._micro_batches))
            else:
                self.manifest.micro_batches = self.manifest.gradient_syncs = None
        if ended == "traced" and self._trace is not None:
            self._trace.end_step()
            self.manifest.traced_steps.append(self._step - 1)
        if ended == "memory" and self._memory is not None:
            self.manifest.memory_steps.append(self._step - 1)
        if begun != ended and ended in ("traced", "memory"):
            self._finish_captures()
            if self._schedule_is_over():
                self.manifest.state = "complete"
            self.write_manifest()

    def _begin_captured_step(self, begun: str) -> None:
        self._roots.mark(begun in ("traced", "memory"))
        self._roots.micro_batches()
        if begun in ("warmup", "traced"):
            if self._trace is None:
                self._trace = TraceCapture(self.folder / TRACE_FILE, self._options)
                self._describe()
            if begun == "warmup":
                self._trace.prepare()
            else:
                self._trace.begin_step(self._step)
        if begun == "memory":
            if self._memory is None:
                self._memory = memory_capture(
                    self.folder,
                    self._device_type(),
                    roots=len(list(self._roots)),
                    stacks=self._options.stacks,
                )
                self.manifest.memory_source = self._memory.source
                self._describe()
                self._describe_tensors()
            self._memory.begin_step(self._step)

    def _finish_captures(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.finish()
        memory, self._memory = self._memory, None
        if memory is not None:
            self._describe_tensors()
            memory.finish()
            self.manifest.allocator_settings = memory.allocator_settings
            self.manifest.allocator = environment.allocator_stats(self.manifest.device.type)

    def _abandon_captures(self) -> None:
        """Stop what still records, and keep what can be written of it: nothing else would ever stop it."""
        captures = self._trace, self._memory
        self._trace = self._memory = None
        for capture in captures:
            if capture is not None:
                try:
                    capture.finish()
                except Exception as error:  # the second one of a recording that has ended
                    self.tell(f"{type(capture).__name__} could not be stopped cleanly: {_reason(error)}")

    def _describe(self) -> None:
        """Fill the manifest from FSDP's structures; before the first forward there is nothing to tell."""
        groups = describe.describe_param_groups(self._roots)
        if groups:
            self.manifest.param_groups = groups
            self.manifest.process_groups = describe.describe_process_groups(groups)
        self.manifest.optimizers = describe.describe_optimizers(self._watch.optimizers)
        device_type = self._device_type()
        self.manifest.device = environment.device_info(device_type)
        self.manifest.allocator = environment.allocator_stats(device_type)
        self.write_manifest()

    def _describe_tensors(self) -> None:
        known = {(tensor.address, tensor.category): tensor for tensor in self.manifest.tensors}
        for tensor in describe.describe_tensors(self._roots, self._watch.optimizers):
            known[tensor.address, tensor.category] = tensor
        self.manifest.tensors = list(known.values())

    def _out_of_memory(self, file: str) -> None:
        self.manifest.memory_source = self.manifest.memory_source or "cuda_snapshot"
        self.tell(f"out of memory in step {self._step}: the allocator's state then is in {file}")
        self.write_manifest()

    def _device_type(self) -> str:
        groups = self.manifest.param_groups or describe.describe_param_groups(self._roots)
        return groups[0].mesh.device_type if groups else "cpu"

    def _guard(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run a capture action; the training goes on whatever happens: a full disk, another profiler."""
        self._busy = True
        try:
            action(*arguments)
        except Exception as error:  # FSDP's private structures may be other ones in another torch
            self.tell(f"recording stopped at step {self._step}: {_reason(error)}")
            self._abandon_captures()
            self._stop_watching()
            self._active = False
            self.manifest.state = "partial"
            self.write_manifest()
        finally:
            self._busy = False
        if (postponed := self._postponed) is not None:
            self._postponed = None
            postponed()

    def _stop_watching(self) -> None:
        self._roots.remove()
        self._watch.remove()

    def _cut_short(self) -> str:
        traced, memory = len(self.manifest.traced_steps), len(self.manifest.memory_steps)
        schedule = self._schedule
        parts = [f"{traced} of {schedule.first_memory - schedule.first_traced} traced steps"]
        if wanted := schedule.end - schedule.first_memory:
            parts.append(f"{memory} of {wanted} memory steps")
        ran = f"only {self._step} of {schedule.end} steps ran"
        return f"schedule cut short: {ran}; complete are {' and '.join(parts)}"

    def _finish_manifest(self, error: str | None, crashed: bool, complete: bool = True) -> None:
        manifest = self.manifest
        if crashed:
            manifest.state = "crashed"
        elif manifest.state == "running":
            manifest.state = "complete" if complete else "partial"
        manifest.error = error
        self.write_manifest()


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
