"""One change to a recorded run: how it is written, what it does to a job, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp2prof.estimators.replay.program import Job
from fsdp2prof.estimators.replay.run import Pace

__all__ = ["Change", "Changed", "NotApplicableError"]


class NotApplicableError(Exception):
    """A change that this run cannot have, with the reason."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A job with a change made."""

    job: Job
    pace: Pace
    memory_bytes: int | None
    """More memory at the peak, on one rank, at most; None is not known."""
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """One change, as it is written on the command line (``forward_prefetch=2``, ``without host_syncs``)."""

    name: str
    value: str
    what: str
    """In words, as the beginning of a sentence: ``explicit forward prefetch of 2``."""
    apply: Callable[[Changed], Changed]
    """Raises :class:`NotApplicableError`."""

    @property
    def text(self) -> str:
        """As it is written on the command line."""
        return f"{self.name}={self.value}" if self.name != "without" else f"without {self.value}"
