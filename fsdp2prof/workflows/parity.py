"""From a model and its batches to whether it trains sharded as it does alone, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2prof.analyzers.sharding.parity import judge_parity
from fsdp2prof.errors import ModelError, UsageError
from fsdp2prof.results import ParityCheck
from fsdp2prof.tables.parity import Measured, ParityMeasurements
from fsdp2prof.worker_processes import Task

if TYPE_CHECKING:
    from fsdp2prof.workflows.parity_rank import ParitySettings

__all__ = ["check_parity"]

_LONGEST = 400
"""Characters of what the user's own code raised."""

_Answer = tuple[list[Measured], list[float]]


def check_parity(
    *,
    model: str,
    batch: str,
    mesh: Mapping[str, int],
    shard: str | None = None,
    steps: int = 3,
    micro_batches: int = 1,
    seed: int = 0,
    device: str = "cpu",
    timeout_s: float = 300.0,
) -> ParityCheck:
    """Train plain on one process and sharded on several, and compare every loss, gradient and parameter.

    ``model``, ``batch`` and ``shard`` are ``package.module:function``; ``mesh`` maps dimensions to sizes,
    the slowest first. Raises ``ModelError`` where the user's functions fail, hang or give nothing to train.
    """
    if shard is None and not mesh.keys() <= {"dp_replicate", "dp_shard"}:
        raise UsageError(
            "--mesh: how to shard over other dimensions than dp_replicate and dp_shard says --shard"
        )
    with tempfile.TemporaryDirectory(prefix="fsdp2prof-parity-") as folder:
        options: dict[str, Any] = {
            "model": model,
            "batch": batch,
            "shard": shard,
            "mesh": dict(mesh),
            "steps": steps,
            "micro_batches": micro_batches,
            "seed": seed,
            "device": device,
            "timeout_s": timeout_s,
            "folder": folder,
        }
        plain, by_rank = Task(_run_all, options).result()
    sharded = [rank_losses for _, rank_losses in by_rank]
    return judge_parity(
        ParityMeasurements(
            model=model,
            mesh=",".join(f"{name}={size}" for name, size in mesh.items()),
            world_size=len(by_rank),
            steps=steps,
            micro_batches=micro_batches,
            by_rank=tuple(tuple(rows) for rows, _ in by_rank),
            plain_losses=tuple(plain),
            sharded_losses=tuple(sum(losses) / len(losses) for losses in zip(*sharded, strict=True)),
        )
    )


def _run_all(options: dict[str, Any]) -> tuple[list[float], list[_Answer]]:
    """In a process that has imported torch and nothing else: fork the plain training, then the ranks."""
    from fsdp2prof.workflows.parity_rank import ParitySettings, run_plain, run_rank

    settings = ParitySettings(**options)
    (plain,) = _fork_all([lambda: run_plain(settings)], ["the plain training"], settings)
    ranks = range(settings.world_size)
    calls = [(lambda rank=rank: run_rank(settings, rank)) for rank in ranks]
    return plain, _fork_all(calls, [f"rank {rank}" for rank in ranks], settings)


def _fork_all(calls: list[Callable[[], Any]], names: list[str], settings: ParitySettings) -> list[Any]:
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
    end = time.monotonic() + settings.timeout_s
    try:
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = ", ".join(names[index] for index in sorted(pipes.values()))
                raise ModelError(f"parity: {late} did not end within {settings.timeout_s:.0f} s (--timeout)")
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
        raise ModelError(f"parity: {name} died without a word") from None
    if error is not None:
        raise ModelError(f"parity: {name} failed: {error}")
    return value


def _answer(pipe: Connection, call: Callable[[], Any]) -> None:
    """In a fork: send what the call gives, or in one line what it raised, and end at once.

    torch's threads for collectives may abort an interpreter that is ending.
    """
    try:
        pipe.send((None, call()))
    except BaseException as error:  # the user's own code may raise anything
        pipe.send((_one_line(error), None))
    pipe.close()
    os._exit(0)


def _one_line(error: BaseException) -> str:
    """What was raised, and the innermost line outside torch."""
    if isinstance(error, ModelError):
        return str(error)
    text = " ".join(str(error).split())[:_LONGEST]
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    ours = str(Path(__file__).parent)
    own = [(file, line) for file, line in frames if "/torch/" not in file and not file.startswith(ours)]
    where = f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""
    return f"{type(error).__name__}: {text}{where}"
