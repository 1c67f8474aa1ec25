"""Make a plan on all cores: the engine in processes, cached results, the best so far on an interrupt."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

import fsdp2prof
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.planner.answers import Question, answer
from fsdp2prof.estimators.planner.confirm import EngineMemory, check_memory, check_step
from fsdp2prof.estimators.planner.plan import Planning
from fsdp2prof.estimators.planner.profile import BlockProfile, measure
from fsdp2prof.estimators.planner.request import Call, PlanRequest, run_one
from fsdp2prof.estimators.step import StepFigures
from fsdp2prof.files import replacing
from fsdp2prof.results.estimate import decoding_hook
from fsdp2prof.results.plan import Plan
from fsdp2prof.worker_processes import Task, usable_cores

_KINDS: dict[str, type] = {
    measure.__name__: BlockProfile,
    check_memory.__name__: EngineMemory,
    check_step.__name__: StepFigures,
}
"""Return type of the engine's functions."""

_ENGINE_SOURCES = ("profile.py", "confirm.py")
"""Modules of the planner that run the engine; the search may change without a new execution."""

_SAME_FILES_SAME_MODEL = ("builtin",)
"""Kinds of models that are identified by name alone."""


def plan(
    request: PlanRequest,
    *,
    question: Question | None = None,
    progress: Callable[[str], None] = lambda _: None,
    use_cache: bool = True,
    refine: bool = False,
) -> Plan:
    """Make a plan, ``refine`` its winner if asked, or answer a question about one.

    An interrupt ends the search with the best so far.

    Raises ``ModelError`` for a model, mesh or batch that no configuration can fulfil, and
    ``KeyboardInterrupt`` for an interrupt before there is a best.
    """
    engine = _Engine(keeps=use_cache and request.model.kind in _SAME_FILES_SAME_MODEL)
    if question is not None:
        return answer(request, question, engine=engine, progress=progress)
    planning = Planning(request=request, engine=engine, progress=progress)
    try:
        planning.run(refine=refine)
    except KeyboardInterrupt:
        if not planning.all():
            raise
    return planning.plan()


@dataclass(frozen=True, slots=True)
class _Engine:
    """Run the execution engine in as many processes as there are cores, and cache its results."""

    keeps: bool

    def __call__(self, calls: Sequence[Call]) -> list[Any]:
        """Return the results of all calls, in order; a ``ModelError`` stands for a call that cannot run."""
        results = [self._kept(*call) for call in calls]
        missing = [index for index, result in enumerate(results) if result is None]
        run = [calls[index] for index in missing]
        if self.keeps:  # each at once, for whoever interrupts this plan and makes it again
            run = [(_run_and_keep, call) for call in run]
        for index, result in zip(missing, _in_processes(run), strict=True):
            results[index] = result
        return results

    def _kept(self, function: Callable[[Any], Any], item: Any) -> Any:
        kind = _KINDS.get(function.__name__)
        if not self.keeps or kind is None:
            return None
        try:
            return msgspec.json.decode(_file(function, item).read_bytes(), type=kind, dec_hook=decoding_hook)
        except (OSError, msgspec.MsgspecError):
            return None


def _run_and_keep(call: Call) -> Any:
    function, item = call
    result = run_one(call)
    if isinstance(result, ModelError) or function.__name__ not in _KINDS:
        return result
    path = _file(function, item)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(msgspec.json.encode(result))
    except OSError:
        pass
    return result


def _in_processes(calls: list[Call]) -> list[Any]:
    """Run a share here, where torch is imported already, and the others in a process each."""
    workers = max(1, min(usable_cores(), len(calls)))
    tasks: list[Task[list[Any]]] = []
    results: list[Any] = [None] * len(calls)
    try:
        with _interrupts_for_this_process():
            tasks = [Task(_run_all, calls[start::workers]) for start in range(1, workers)]
        results[::workers] = _run_all(calls[::workers])
        for start, task in enumerate(tasks, start=1):
            results[start::workers] = task.result()
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    return results


def _run_all(calls: list[Call]) -> list[Any]:
    return [run_one(call) for call in calls]


@contextmanager
def _interrupts_for_this_process() -> Iterator[None]:
    """Start processes that an interrupt of the terminal does not reach: this one ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _file(function: Callable[[Any], Any], item: Any) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(f"{_source_digest()} {function.__name__} {item!r}".encode()).hexdigest()
    return home / "fsdp2prof" / "plans" / f"{key[:40]}.json"


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Digest of the engine's code and of torch's version, instead of a manual version number."""
    import torch

    digest = hashlib.sha256(torch.__version__.encode())
    package = Path(fsdp2prof.__file__).parent / "estimators"
    sources = sorted([*package.glob("**/*.py"), *package.glob("**/*.yaml")])
    for source in sources:
        if source.parent.name != "planner" or source.name in _ENGINE_SOURCES:
            digest.update(source.read_bytes())
    return digest.hexdigest()
