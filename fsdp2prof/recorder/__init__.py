"""Recording a training run: the launcher around it, and what runs inside each rank.

Outside the ranks:

- ``launcher``: starts the command, passes signals and the exit code, says how the run ended;
- ``summaries``: processes that analyse what was recorded;
- ``host_processes``: ranks seen in ``/proc``, to explain a silent rank and to leave none behind;
- ``bootstrap/sitecustomize``: on ``PYTHONPATH``, waits in every Python process for FSDP2 to be imported.

Inside a rank, once it has called ``fully_shard``:

- ``rehearsal``: a world that is not there, tensors without data;
- ``attach``: wraps ``fully_shard``;
- ``session``: the training steps and the end of a rank;
- ``recordings`` and ``requests``: several recordings of one run, the same steps on all ranks;
- ``watching``: a line a step;
- ``captures``: what is captured in which step;
- ``training_profilers``: the training's own profilers, which ours makes way for;
- ``stepping`` and ``roots``: where a training step begins and ends, which modules are roots;
- ``tracing`` and ``memory.history``: the captures;
- ``rank.manifest``, ``describe`` and ``devices``: the manifest;
- ``ending``: the one session of the process; exit, exceptions and SIGTERM, so that nothing captured is lost.

Importing this package imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp2prof.recorder.api import Recorder

__all__ = ["Recorder"]


def __getattr__(name: str) -> Any:
    if name != "Recorder":
        raise AttributeError(f"module 'fsdp2prof.recorder' has no attribute {name!r}")
    from fsdp2prof.recorder.api import Recorder

    return Recorder
