"""Pipeline schedules: one row each, with the properties that the estimates need."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.option import Counted


class Interleaved(Counted, word="interleaved"):
    """Each rank of a pipeline holds K stages and works on them in turn."""


class LoopedBfs(Counted, word="bfs"):
    """K stages a rank: all micro-batches of a stage before the next."""


class ZeroBubble(Counted, word="zb1p"):
    """K stages per rank, and a backward in two parts: the weights' part fills the bubble."""


ScheduleWord = Literal["1f1b", "gpipe", "zb1p", "zbv"]
PipelineSchedule: TypeAlias = ScheduleWord | Interleaved | LoopedBfs | ZeroBubble


class ScheduleRule(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one schedule of ``torch.distributed.pipelining``."""

    title: str
    torch_class: str
    stages: int = 1
    """Per rank, unless they are counted."""
    splits_backward: bool = False
    """Gradients of a stage's input come first, and those of its weights later."""
    forwards_first: bool = False
    """All micro-batches of a stage run forward before any runs backward."""
    is_v: bool = False
    """Stages go up the ranks and down again: the first rank has the first and the last."""

    @property
    def torchtitan_name(self) -> str:
        """As torch's ``get_schedule_class`` and torchtitan name it."""
        return self.torch_class.removeprefix("Schedule")


SCHEDULES: dict[str, ScheduleRule] = {
    "1f1b": ScheduleRule(title="1F1B", torch_class="Schedule1F1B"),
    "gpipe": ScheduleRule(title="GPipe", torch_class="ScheduleGPipe", forwards_first=True),
    "interleaved": ScheduleRule(title="interleaved 1F1B", torch_class="ScheduleInterleaved1F1B"),
    "bfs": ScheduleRule(title="looped BFS", torch_class="ScheduleLoopedBFS", forwards_first=True),
    "zb1p": ScheduleRule(
        title="zero-bubble ZB1P", torch_class="ScheduleInterleavedZeroBubble", splits_backward=True
    ),
    "zbv": ScheduleRule(
        title="zero-bubble ZBV",
        torch_class="ScheduleZBVZeroBubble",
        stages=2,
        splits_backward=True,
        is_v=True,
    ),
}
"""By the word of ``--pp-schedule``."""


class LayersPerStage(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer's stages by their length; how many a rank holds follows from the model's layers."""

    word: str
    """Of the schedule, without its count."""
    layers: int
    ranks: int
    said: str
    """The key and its value, for errors."""
    rounding: str | None = None
    """Whether the number of stages is rounded ``up`` or ``down`` to a multiple of the ranks."""

    def schedule(self, layers: int | None, ends: int) -> str:
        """The schedule with its count for a model of ``layers``, whose ends count as ``ends`` each.

        Raises ``ModelError`` if the layers are not known, or do not fill every rank's stages alike.
        """
        if layers is None:
            raise ModelError(
                f"{self.said}: a rank's stages follow from the model's layers, whose number is not known: "
                f"add --pp-schedule {self.word}:K"
            )
        stages = -(-(layers + 2 * ends) // self.layers)
        left = stages % self.ranks
        if left and self.rounding not in ("up", "down"):
            raise ModelError(f"{self.said}: {stages} stages are not a multiple of pp={self.ranks}")
        stages += (self.ranks - left if self.rounding == "up" else -left) if left else 0
        if stages < 2 * self.ranks:
            raise ModelError(f"{self.said}: {self.word} needs two stages a rank or more, not {stages} in all")
        return f"{self.word}:{stages // self.ranks}"


def schedule_rule(schedule: PipelineSchedule) -> ScheduleRule:
    """The row of a schedule."""
    return SCHEDULES[schedule.word if isinstance(schedule, Counted) else schedule]


def stages_of(schedule: PipelineSchedule) -> int:
    """Stages that a rank holds."""
    return schedule.count if isinstance(schedule, Counted) else schedule_rule(schedule).stages


def has_ends(schedule: PipelineSchedule, ranks: int, rank: int) -> tuple[bool, bool]:
    """Whether a rank holds the first and the last stage."""
    return rank == 0, rank == (0 if schedule_rule(schedule).is_v else ranks - 1)
