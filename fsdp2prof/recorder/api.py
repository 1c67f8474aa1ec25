"""The recorder for frameworks and custom loops, without a launcher."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fsdp2prof.errors import RunDirectoryError, UsageError
from fsdp2prof.files import write_json
from fsdp2prof.manifest import RecordOptions, RunInfo
from fsdp2prof.recorder.guard import guard
from fsdp2prof.recorder.launch.summaries import MODULE
from fsdp2prof.recorder.rank.ending import session_of_process, start_session
from fsdp2prof.recorder.rank.session import RankSession
from fsdp2prof.recorder.run_folder import now, prepare_run
from fsdp2prof.recorder.settings import Settings, validate
from fsdp2prof.run_directory import RUN_FILE

Value = TypeVar("Value")


class Recorder:
    """Records the training steps of this rank into a run directory.

    ::

        with fsdp2prof.Recorder("runs/mine") as recorder:
            for batch in loader:
                train_step(batch)
                recorder.step()

    Enter it on every rank, after the modules are wrapped and with the same arguments; call :meth:`step` at
    the end of each training step. ``options`` are the fields of :class:`~fsdp2prof.manifest.RecordOptions`,
    which are those of ``fsdp2prof record``. Under the launcher its directory and options hold, and only the
    step boundaries are taken from here.

    Raises ``UsageError`` for unknown or inconsistent options, ``RunDirectoryError`` if the directory is
    there and ``force`` is not given.
    """

    def __init__(
        self,
        output: str | Path,
        *,
        force: bool = False,
        **options: Any,
    ) -> None:
        self._path = Path(output)
        self._force = force
        self._options = _unless_refused(_options, options) or RecordOptions()
        self._info = RunInfo()
        self._session: RankSession | None = None
        self._launched = self._entered = False

    def __enter__(self) -> Recorder:
        session = guard.run("recording", session_of_process)
        self._launched = session is not None
        if session is None:
            _unless_refused(self._prepare_run)
        self._entered = True
        self._session = guard.run("recording", self._take_over, session)
        return self

    def step(self) -> None:
        """End the running training step. Raises ``UsageError`` outside the ``with`` block."""
        if not self._entered:
            raise UsageError("Recorder.step() outside of its block; write `with Recorder(...) as recorder:`")
        if self._session is not None:
            self._session.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        session, self._session = self._session, None
        if session is not None and not self._launched:
            guard.run("ending", self._end, session, kind, error)

    def _take_over(self, session: RankSession | None) -> RankSession:
        if session is None:
            settings = Settings(run=str(self._path.resolve()), options=self._options)
            session = start_session(settings, automatic=False)
        for item in gc.get_objects():
            if issubclass(type(item), FSDPModule):
                session.watch(item)
        session.take_over()
        return session

    def _end(
        self, session: RankSession, kind: type[BaseException] | None, error: BaseException | None
    ) -> None:
        crashed = kind is not None and not issubclass(kind, KeyboardInterrupt)
        session.end(None if error is None else f"{type(error).__name__}: {error}", crashed=crashed)
        for folder in session.to_summarise:
            command = [sys.executable, "-m", MODULE, str(folder)]
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if session.manifest.rank == 0:
            manifest = session.manifest
            self._info.state = manifest.state
            self._info.finished_at = now()
            self._info.world_size = manifest.world_size
            self._info.hosts = [manifest.host]
            write_json(self._path / RUN_FILE, self._info)

    def _prepare_run(self) -> None:
        """Let rank 0 create the directory and inform the others, so that all of them refuse or none does."""
        outcome: list[str | None] = [None, None]
        together = dist.is_available() and dist.is_initialized()
        if not together or dist.get_rank() == 0:
            try:
                self._info = prepare_run(self._path, self._options, list(sys.argv), force=self._force)
            except RunDirectoryError as error:
                outcome[0] = str(error)
            except Exception as error:  # the other ranks wait for the outcome
                outcome[1] = f"{self._path}: {type(error).__name__}: {error}"
        if together:
            dist.broadcast_object_list(outcome, src=0)
        refused, failed = outcome
        if refused is not None:
            raise RunDirectoryError(refused)
        if failed is not None:
            guard.fail("recording", RunDirectoryError(failed))


def _options(given: dict[str, Any]) -> RecordOptions:
    known = RecordOptions.__struct_fields__
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UsageError(f"Recorder has no option {unknown[0]!r}; there are {', '.join(known)}")
    options = RecordOptions(**given)
    validate(options)
    return options


def _unless_refused(action: Callable[..., Value], /, *arguments: Any) -> Value | None:
    """Return what ``action`` returns. A refusal of the caller's arguments is raised; any other failure
    costs the recording."""
    try:
        return action(*arguments)
    except (UsageError, RunDirectoryError):
        raise
    except Exception as error:
        guard.fail("recording", error)
        return None
