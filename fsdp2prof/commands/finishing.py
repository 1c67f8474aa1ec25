"""From the files of a job to what a command writes of them, wherever the ranks are read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsdp2prof.commands.gate import Gate, Judged
from fsdp2prof.commands.output import Output
from fsdp2prof.commands.view import View
from fsdp2prof.workflows.rendering import Rendering

if TYPE_CHECKING:
    from fsdp2prof.workflows.analyze import Part
    from fsdp2prof.workflows.job.job_files import JobFiles
    from fsdp2prof.workflows.ranks.places import TraceOptions

__all__ = ["write_analysis", "write_finished"]

Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class _Finish:
    """What is made of a result; it may travel to where the result is."""

    rendering: Rendering
    view: View | None
    gate: Gate

    def __call__(self, result: Any) -> tuple[str | bytes, Judged]:
        part = result if self.view is None else self.view.of(result)
        return self.rendering.of(part), self.gate.judge(result)


def write_analysis(
    part: Part | None,
    path: Path,
    find: Callable[[], JobFiles],
    options: TraceOptions,
    output: Output,
    *,
    doing: str,
    view: View | None = None,
    gate: Gate | None = None,
) -> None:
    """Analyse a part of what is at a path (None: whatever is there), write it, and tell of the gate.

    ``doing`` is shown while this goes on.
    """
    finish = _Finish(output.rendering(path), view, gate or Gate(()))
    finish.gate.tell(write_finished(part, find, options, output, finish, doing=doing))


def write_finished(
    part: Part | None,
    find: Callable[[], JobFiles],
    options: TraceOptions,
    output: Output,
    finish: Callable[[Any], tuple[str | bytes | None, Told]],
    *,
    doing: str,
) -> Told:
    """Analyse a part of a job, write what ``finish`` makes of it (None: nothing), return what it tells."""
    with ExitStack() as stack:
        with output.progress(doing):
            from fsdp2prof.workflows.analyze import part_of
            from fsdp2prof.workflows.finished import finished

            job = find()
            made = stack.enter_context(finished(part or part_of(job), job, options, finish))
        if made.content is not None:
            output.write(made.content)
    return made.told
