"""The processes of a parity check: forks of a process that has imported torch but not used it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 - fully_shard and optimizers import it, each fork for itself

from fsdp2prof.errors import ModelError
from fsdp2prof.tables.probes import ParityMeasurements
from fsdp2prof.workflows.probes.parity_rank import ParitySettings, run_plain, run_rank

_LONGEST = 400
"""Characters of an exception of the user's own code."""


def train_both(settings: ParitySettings) -> ParityMeasurements:
    """Train plain, then sharded, each process a fork of this one, in which torch must have no threads yet.

    Raises ``ModelError`` where the user's functions fail or hang.
    """
    ranks = range(settings.world_size)
    (plain,) = _fork_all([partial(run_plain, settings)], ["the plain training"], settings.timeout_s)
    calls = [partial(run_rank, settings, rank) for rank in ranks]
    answers = _fork_all(calls, [f"rank {rank}" for rank in ranks], settings.timeout_s)
    return ParityMeasurements(
        model=settings.model,
        mesh=",".join(f"{name}={size}" for name, size in settings.mesh.items()),
        world_size=settings.world_size,
        steps=settings.steps,
        micro_batches=settings.micro_batches,
        by_rank=tuple(tuple(rows) for rows, _ in answers),
        plain_losses=tuple(plain),
        sharded_losses=tuple(
            sum(losses) / len(losses) for losses in zip(*(means for _, means in answers), strict=True)
        ),
    )


def _fork_all(calls: Sequence[Callable[[], Any]], names: Sequence[str], timeout_s: float) -> list[Any]:
    """Run each call in a fork of this process; the first that fails ends them all."""
    context = multiprocessing.get_context("fork")
    pipes: dict[Connection, int] = {}
    processes = []
    for index, call in enumerate(calls):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(theirs, call), daemon=True)
        process.start()
        theirs.close()
        pipes[ours] = index
        processes.append(process)
    answers: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    try:
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = ", ".join(names[index] for index in sorted(pipes.values()))
                raise ModelError(f"parity: {late} did not end within {timeout_s:.0f} s (--timeout)")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                index = pipes.pop(pipe)
                answers[index] = _received(pipe, names[index])
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [answers[index] for index in range(len(calls))]


def _received(pipe: Connection, name: str) -> Any:
    try:
        error, value = pipe.recv()
    except EOFError:
        raise ModelError(f"parity: {name} died without a message") from None
    if error is not None:
        raise ModelError(f"parity: {name} failed: {error}")
    return value


def _answer(pipe: Connection, call: Callable[[], Any]) -> None:
    """In a fork: send the result of the call, or its exception in one line, and exit at once.

    torch's collective threads may abort an interpreter that is shutting down.
    """
    try:
        pipe.send((None, call()))
    except BaseException as error:  # the user's own code may raise anything
        pipe.send((_one_line(error), None))
    pipe.close()
    os._exit(0)


def _one_line(error: BaseException) -> str:
    """Return the exception and the innermost line outside torch."""
    if isinstance(error, ModelError):
        return str(error)
    text = " ".join(str(error).split())[:_LONGEST]
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    ours = str(Path(__file__).parents[1])
    own = [(file, line) for file, line in frames if "/torch/" not in file and not file.startswith(ours)]
    where = f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""
    return f"{type(error).__name__}: {text}{where}"
