"""The memory recording: the CUDA allocator's own history, or an exact count of storages on a CPU.

Tags on CUDA allocations name the training step, phase, module and FSDP activity that made each one.
``torch.cuda.memory._set_memory_metadata`` (torch >= 2.10) attaches a text to every allocation that the
calling thread makes until its next call. The text is
``step=5;phase=forward;activity=all_gather;fqn=layers.0``, the module last since its name may hold anything;
with several roots it is ``root1:layers.0``. It is empty where no label says whose work it is: after the
root's forward, after the backward, outside the optimizer.

A thread can change its own tag only, and on CUDA backward has a thread of its own: until FSDP's first label
it allocates under the tag that the last backward left there. An analysis believes a tag only where the labels
around it agree. For the same reason every run of the autograd engine is inside a range of our own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fsdp2prof.files import replacing
from fsdp2prof.labels import BACKWARD, FsdpLabel, parse_label, qualified_fqn
from fsdp2prof.recorder.guard import Enter, guard
from fsdp2prof.recorder.model import describe
from fsdp2prof.recorder.model.roots import Range
from fsdp2prof.recorder.rehearsal import fake_mode
from fsdp2prof.run_directory import OOM_SNAPSHOT_FILE, SNAPSHOT_FILE, STORAGE_COUNT_FILE
from fsdp2prof.storage_tracker import StorageTracker, has_compiled

_COMPILED = (
    "counting storages on a CPU would run torch.compile's code eagerly, with other random numbers; "
    "record without torch.compile, or on a GPU"
)
_MODE = "the training uses a TorchDispatchMode, which cannot be combined with counting storages"
_HISTORY = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
MAX_ENTRIES = 2_000_000
"""Entries the CUDA history keeps: tens of steps of a large model; older ones are overwritten."""


def why_not(device_type: str) -> str | None:
    """Say why memory cannot be recorded, at all or without a change to the training; None if it can."""
    if device_type not in ("cuda", "cpu"):
        return f"fsdp2prof cannot read the allocator history of {device_type} devices"
    fake = fake_mode()
    if device_type == "cuda" and fake is None:
        if (reason := why_no_history()) is not None:
            return reason
        if any(torch.cuda.memory._snapshot()["device_traces"]):
            return "the training records the allocator's history itself, which ours would clear"
    elif fake is None and _get_current_dispatch_mode_stack():
        return _MODE
    elif device_type == "cpu" and (has_compiled() or describe.may_run_unseen()):
        return _COMPILED
    return None


def why_no_history() -> str | None:
    """Return why torch knows no allocations of its CUDA allocator: it records only those of its own
    allocator."""
    ask = getattr(torch._C, "_cuda_getAllocatorBackend", None)
    backend = ask() if ask else "native"
    return None if backend == "native" else f"torch keeps no history of the {backend} allocator's memory"


def memory_capture(
    folder: Path, device_type: str, *, roots: int, stacks: bool
) -> CudaMemoryCapture | CpuMemoryCapture:
    """Return the capture for a device type; memory that is not on a ``cuda`` device is counted."""
    if device_type == "cuda" and fake_mode() is None:
        return CudaMemoryCapture(folder / SNAPSHOT_FILE, several_roots=roots > 1)
    return CpuMemoryCapture(folder / STORAGE_COUNT_FILE, device_type, stacks=stacks)


def count_from_now(*, stacks: bool) -> None:
    """Begin the count of a rehearsal before its first step: the segments that construction leaves stay."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    _begun[device_type] = _tracker(device_type, stacks=stacks)
    _begun[device_type].start()


_begun: dict[str, StorageTracker] = {}
"""The count that runs already, by its type of device."""


def _tracker(device_type: str, *, stacks: bool) -> StorageTracker:
    return StorageTracker(
        device=f"cuda:{torch.cuda.current_device()}" if device_type == "cuda" else "cpu",
        fake_mode=fake_mode(),
        stacks=stacks,
        around=partial(guard.around, "memory"),
        hook=partial(guard.hook, "memory"),
    )


class CpuMemoryCapture:
    """Counts every storage (``fsdp2prof.storage_tracker``) and writes ``memory.npz``."""

    source = "storage_count"

    def __init__(self, path: Path, device_type: str, *, stacks: bool) -> None:
        self.allocator_settings: dict[str, str] = {}
        self.lost: str | None = None
        self._path = path
        self._fake = fake_mode() is not None
        self._unwatch: Callable[[], None] | None = None
        self._running = device_type in _begun
        self._tracker = _begun.pop(device_type) if self._running else _tracker(device_type, stacks=stacks)

    def begin_step(self, step: int) -> None:
        """Begin a step, and the count with the first step."""
        if self.lost is not None:
            return
        if not self._running:
            self._unwatch = describe.watch_entry(self._give_way)
            self._tracker.start()
            self._running = True
        self._tracker.mark_step(step)

    def address(self, tensor: torch.Tensor) -> int:
        """Return the storage's address, or the number that the count gave it if it has none."""
        return self._tracker.address(tensor) if self._fake else tensor.untyped_storage().data_ptr()

    def finish(self) -> None:
        """Stop counting and write the recording."""
        from fsdp2prof.recorder.memory.recording_file import write_recording

        if self._running:
            self.discard()
            write_recording(self._path, self._tracker.recording())

    def discard(self) -> bool:
        """Stop counting; the count cannot leave torch while an operator runs."""
        if self._running:
            self._tracker.stop()
            self._running = False
        if not self._tracker.leave():
            return False
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        return True

    def forget(self) -> None:
        """Stop counting in a forked child."""
        self.discard()

    def _give_way(self) -> None:
        """Stop before code runs that was given to ``torch.compile`` and has not run until now."""
        if not self._fake:
            self.lost = _COMPILED
            self.discard()


class CudaMemoryCapture:
    """Turns on the allocator's history, tags every allocation with its phase and writes the snapshot."""

    source = "cuda_snapshot"

    def __init__(self, path: Path, *, several_roots: bool) -> None:
        self.allocator_settings: dict[str, str] = {}
        self.lost: str | None = None
        self._path = path
        self._tags = AllocationTags(several_roots=several_roots)
        self._step: Range | None = None
        self._number = -1
        self._running = False
        self._watched: list[tuple[str, Any, Any]] = []
        """Functions of ``torch._C`` that switch the history on and off: name, torch's own, our wrapper."""

    def begin_step(self, step: int) -> None:
        """Begin a step, and the history with the first step."""
        self._number = step
        if self.lost is not None:
            return
        if not self._running:
            record_history()
            self._running = True
            self._watch_history()
            self._tags.start()
        self._end_step()
        self._tags.mark_step(step)
        self._step = Range(f"ProfilerStep#{step}")

    def address(self, tensor: torch.Tensor) -> int:
        """Return the storage's address."""
        return tensor.untyped_storage().data_ptr()

    def finish(self) -> None:
        """Write the snapshot and switch the history off."""
        if self._running:
            self._end_step()
            self._tags.stop()
            try:
                self.allocator_settings = dump_snapshot(self._path)
            finally:
                self.discard()

    def discard(self) -> bool:
        """Turn the history off."""
        if self._running:
            try:
                self._leave()
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        return True

    def _watch_history(self) -> None:
        for name in _HISTORY:
            if (original := getattr(torch._C, name, None)) is not None:
                ours = guard.around("memory", original, self._give_way)
                setattr(torch._C, name, ours)
                self._watched.append((name, original, ours))

    def _give_way(self, enabled: object = None, *_: Any, **__: Any) -> None:
        """Leave the history to the training, which is about to switch it on or off."""
        if self._running:
            self.lost = (
                f"the training turned its own allocator history {'on' if enabled else 'off'} in step "
                f"{self._number}; torch has only one history"
            )
            self._leave()

    def _leave(self) -> None:
        """Take everything out of torch but the history."""
        self._running = False
        for name, original, ours in self._watched:
            if getattr(torch._C, name) is ours:
                setattr(torch._C, name, original)
        self._watched.clear()
        self._end_step()
        self._tags.stop()

    def forget(self) -> None:
        """Stop tagging in a forked child, where CUDA cannot be used."""
        self._tags.forget()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.close()
            self._step = None


class OomDump:
    """Writes a snapshot when the CUDA allocator runs out of memory, in any step.

    ``tell`` is called with the file's name. The recording of the memory steps, if it exists or is still to
    be written (``is_recording``), has a separate file.
    """

    def __init__(
        self, folder: Path, tell: Callable[[str], None], is_recording: Callable[[], bool] = lambda: False
    ) -> None:
        self._folder = folder
        self._tell = tell
        self._is_recording = is_recording
        self.written: Path | None = None
        observer = guard.hook("oom", self._dump)  # what it raised would replace the training's own error
        torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]

    def _dump(self, *_: Any) -> None:
        path = self._folder / SNAPSHOT_FILE
        if self._is_recording() or (path.exists() and path != self.written):
            path = self._folder / OOM_SNAPSHOT_FILE
        dump_snapshot(path)
        self.written = path
        self._tell(path.name)


def record_history() -> None:
    """Turn the allocator's history on, with the FSDP labels in it where this torch can."""
    options: dict[str, Any] = {"stacks": "python", "max_entries": MAX_ENTRIES, "clear_history": True}
    options["global_record_annotations"] = True
    known = signature(torch.cuda.memory._record_memory_history).parameters
    supported = {name: value for name, value in options.items() if name in known}
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", **supported)


def dump_snapshot(path: Path) -> dict[str, str]:
    """Write the allocator's snapshot as a pickle of builtin containers; returns the allocator's settings."""
    snapshot = torch.cuda.memory._snapshot()
    with replacing(path) as temporary, temporary.open("wb") as file:
        pickle.dump(snapshot, file, protocol=pickle.HIGHEST_PROTOCOL)
    return {str(name): str(value) for name, value in snapshot.get("allocator_settings", {}).items()}


_Place = tuple[str, str, str]
"""Phase, activity, module."""
_OPTIMIZER = FsdpLabel("optimizer")


class TagState:
    """Where a training step stands, from the labels it enters and leaves.

    Inside a label, its own module and activity; after ``pre_forward (X)`` X computes until
    ``post_forward (X)``, after ``pre_backward (X)`` until its post-backward; the optimizer's
    ranges are the optimizer's, outside of a closure's forward and backward.
    """

    def __init__(self, *, several_roots: bool = False) -> None:
        self._several_roots = several_roots
        self._roots: list[int] = []
        """Open ranges of roots, outermost first."""
        self._open: list[tuple[str, _Place | None]] = []
        """Open labels and where the step stood before each."""
        self._forward: list[str] = []
        """Modules in forward, outermost first."""
        self.place: _Place | None = None
        """None if no label determines it."""

    def enter(self, name: str) -> bool:
        """Enter a range; False if nothing allocated in it belongs elsewhere than before."""
        label = parse_label(name)
        if label is None:
            return False
        if label.root is not None:
            self._roots.append(label.root)
            return False
        self._open.append((name, self.place))
        if label.kind == "optimizer":
            self.place = ("optimizer", "compute", "")
            return True
        phase = self.place[0] if self.place is not None else "other"
        if label.is_backward:
            phase = "backward"
        elif label.kind in ("root_pre_forward", "pre_forward", "post_forward") and phase != "backward":
            phase = "forward"
        self.place = (phase, label.activity, self._qualified(label.fqn or ""))
        return True

    def leave(self, name: str) -> None:
        """Leave the innermost open range of this name, if there is one."""
        label = parse_label(name)
        if label is not None and label.root is not None and self._roots:
            self._roots.pop()
        position = next((i for i in reversed(range(len(self._open))) if self._open[i][0] == name), None)
        if label is None or position is None:
            return
        before = self._open[position][1]
        del self._open[position:]
        fqn = self._qualified(label.fqn or "")
        phase = self.place[0] if self.place is not None else "other"
        if label.kind == "pre_forward":
            self._forward.append(fqn)
            self.place = (phase, "compute", fqn)
        elif label.kind == "post_forward" and self._forward:
            self._forward.pop()
            self.place = (phase, "compute", self._forward[-1]) if self._forward else None
        elif label.kind == "pre_backward":
            self.place = ("backward", "compute", fqn)
        elif label.kind == "root_post_backward_callback":
            self.end_backward()
        else:
            self.place = before

    def end_backward(self) -> None:
        """Leave the backward: the rest belongs to the optimizer if a closure called it."""
        self._forward.clear()
        in_closure = any(parse_label(opened) == _OPTIMIZER for opened, _ in self._open)
        self.place = ("optimizer", "compute", "") if in_closure else None

    def _qualified(self, fqn: str) -> str:
        return qualified_fqn(fqn, self._roots[-1], 2) if self._several_roots and self._roots else fqn


class AllocationTags:
    """Keeps the allocator's metadata up to date with the labels; does nothing where torch has none."""

    def __init__(self, *, several_roots: bool) -> None:
        self._set: Any = getattr(torch.cuda.memory, "_set_memory_metadata", None)
        self._state = TagState(several_roots=several_roots)
        self._step = -1
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        """Owner, name, torch's own function and ours in its place."""
        self._in_backward = False

    def start(self) -> None:
        """Begin following ``record_function`` ranges and the autograd engine's runs."""
        guard.when_off("tags", self.stop)
        if hasattr(torch.autograd, "_engine_run_backward"):
            self._replace(torch.autograd, "_engine_run_backward", self._run_engine)
        if self._set is not None:
            self._replace(record_function, "__enter__", self._enter)
            self._replace(record_function, "__exit__", self._leave)

    def _replace(self, owner: Any, name: str, enter: Enter) -> None:
        original = getattr(owner, name)
        ours = guard.around("tags", original, enter)
        setattr(owner, name, ours)
        self._replaced.append((owner, name, original, ours))

    def _enter(self, label: record_function) -> None:
        if self._replaced and self._state.enter(label.name):
            self._update()

    def _leave(self, label: record_function, *_: Any) -> Callable[..., None]:
        def left(*_: Any) -> None:
            if self._replaced:
                self._state.leave(label.name)
                self._update()

        return left

    def _run_engine(self, *_: Any, **__: Any) -> Callable[..., None] | None:
        """Put our range around every run of the engine; one inside another is part of it."""
        if self._in_backward or not self._replaced:
            return None
        self._in_backward = True
        label = Range(BACKWARD)

        def ran(*_: Any) -> None:
            self._in_backward = False
            label.close()
            if self._set is not None:
                self._state.end_backward()
                self._update()

        return ran

    def mark_step(self, step: int) -> None:
        """Tag further allocations with this training step."""
        self._step = step
        if self._set is not None:
            self._update()

    def stop(self) -> None:
        """Stop tagging."""
        is_tagging = bool(self._replaced) and self._set is not None
        self.forget()
        if is_tagging:
            self._set("")

    def forget(self) -> None:
        """Stop following the ranges; the last tag stays."""
        for owner, name, original, ours in reversed(self._replaced):
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
        self._replaced.clear()

    def _update(self) -> None:
        if self._state.place is None:
            self._set("")
            return
        phase, activity, fqn = self._state.place
        self._set(f"step={self._step};phase={phase};activity={activity};fqn={fqn}")
