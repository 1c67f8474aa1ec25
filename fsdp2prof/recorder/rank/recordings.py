"""Several recordings in one run: when the next one is due, and that all ranks record the same steps.

The lowest selected rank, the leader, decides. It announces a recording some steps ahead, and every rank looks
for the next announcement (:class:`Announcements`) where a step begins. A rank that sees it only after it was
to begin leaves the recording out and says so: ranks never record different steps under one number.
"""

from __future__ import annotations

import math
import os
import signal
from collections import deque
from pathlib import Path
from statistics import median

import msgspec

from fsdp2prof.manifest import RecordingInfo, RecordOptions, StepInfo
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.model.roots import Roots
from fsdp2prof.recorder.rank.agreement import Announcements
from fsdp2prof.recorder.rank.captures import Captures
from fsdp2prof.recorder.rank.manifest import ManifestFile
from fsdp2prof.recorder.rank.signals import HeardSignal
from fsdp2prof.recorder.rank.stepping import OptimizerWatch
from fsdp2prof.recorder.requests import (
    bytes_taken,
    newest,
    request_recording,
    request_summary,
    take_request,
)
from fsdp2prof.recorder.settings import Settings, leader, warmup_of
from fsdp2prof.run_directory import recording_folder
from fsdp2prof.units import parse_bytes


class Summaries:
    """Of one rank: asks for them, for a child would be one that the training waits for."""

    def __init__(self, settings: Settings, *, launched: bool) -> None:
        self._settings, self._launched = settings, launched
        self._asked: set[Path] = set()
        self.waiting: list[Path] = []
        """Folders to summarise when the recorder ends, where no launcher does it."""

    def begin(self, folder: Path) -> None:
        """Have a rank's folder summarised, once."""
        if folder in self._asked:
            return
        self._asked.add(folder)
        if self._launched:
            request_summary(self._settings.path, self._settings.node_rank, folder)
        else:
            self.waiting.append(folder)


LEAST_LEAD = 3
"""Steps between an announcement and the first captured step: no rank is further ahead of another."""
LEAD_S = 2.0
"""Seconds between them, in which a shared disk shows the announcement to every node."""
RECENT_STEPS = 100
"""Steps whose times are kept: what a slow one is compared with."""
LEAST_FOR_MEDIAN = 10
FIRST_SETTLED_STEP = 2
"""From it on every optimizer has stepped, and who updates what is known."""


class Recordings:
    """The recordings of one rank; :attr:`current` is the one that runs or is due, or captures nothing."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        roots: Roots,
        watch: OptimizerWatch,
        file: ManifestFile,
        summaries: Summaries | None = None,
    ) -> None:
        self._settings, self._options = settings, settings.options
        self._identity, self._roots, self._watch, self._file = identity, roots, watch, file
        self._summaries = summaries
        self._run = settings.path
        self._leads = identity.rank == leader(settings.options.ranks, identity.world_size)
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._announcements = Announcements(self._run, self._attempt)
        self._number = newest(self._run, before_attempt=self._attempt)
        self._scheduled = _first(self._options)
        self._limit = None if self._options.max_size is None else parse_bytes(self._options.max_size)
        self._recent: deque[StepInfo] = deque(maxlen=RECENT_STEPS)
        self._asked: str | None = None
        self._signalled = False
        self._idle = Captures(file, _nothing(self._options), roots)
        self._own: ManifestFile | None = None
        self.current = self._idle

    def listen(self) -> None:
        """Hear the signal that asks for a recording; a handler of the training's is called too."""
        if self._options.signal is None:
            return
        try:
            HeardSignal(signal.Signals[f"SIG{self._options.signal}"], self._hear)
        except ValueError as error:
            self._file.tell(f"--signal {self._options.signal} has no effect: {error}")

    def _hear(self) -> None:
        self._signalled = True

    def keep(self, step: StepInfo) -> None:
        """Keep the time of a step that has ended, and notice a slow one."""
        if self._options.on_slow is not None and self._leads and step.kind == "plain":
            plain = [one.duration_ns for one in self._recent if one.kind == "plain"]
            if len(plain) >= LEAST_FOR_MEDIAN and step.duration_ns > self._options.on_slow * median(plain):
                times = step.duration_ns / median(plain)
                self._asked = f"step {step.step} took {times:.2f} times as long as the median before it"
        self._recent.append(step)

    def next_step(self, step: int) -> None:
        """Decide on recordings where ``step`` begins."""
        if self._own is not None and self.current.is_over:
            self.close(whole=self.current.is_whole)
        self._look(step)
        signalled, self._signalled = self._signalled, False
        if self._own is None and signalled:
            request_recording(self._run, f"signal {self._options.signal}")
        if self._own is None and self._leads:
            self._decide(step)
            self._look(step)

    def begin(self, plan: RecordingInfo, traced: int) -> None:
        """Begin a recording that every rank plans alike: of ``traced`` steps and one of memory."""
        if self._leads:
            self._announcements.announce(plan)
        options = msgspec.structs.replace(self._options, warmup=1, active=traced, memory_steps=1)
        self._take_up(plan, plan.announced_at_step, options)

    def end(self) -> None:
        """End such a recording, whatever of it is there."""
        if self._own is not None:
            whole = self.current.is_over and self.current.is_whole
            self.current.finish()
            self.close(whole=whole)

    def close(self, *, whole: bool) -> None:
        """End the recording that runs, if one does: its manifest says what it holds."""
        own, self._own = self._own, None
        if own is None:
            return
        if (told := self.current.told_of_profiler()) is not None:
            own.tell(told)
        own.manifest.steps = list(self._recent)
        own.manifest.state = "complete" if whole else "partial"
        if not whole:
            own.tell(f"ended early; complete: {self.current.shortfall()}")
        own.write()
        if self._summaries is not None and (own.manifest.traced_steps or own.manifest.memory_steps):
            self._summaries.begin(own.folder)
        self.current = self._idle

    def _look(self, step: int) -> None:
        """Take up the next recording if it is announced."""
        plan = self._announcements.read(self._number + 1) if self._own is None else None
        if plan is not None:
            self._take_up(plan, step, self._options)

    def _decide(self, step: int) -> None:
        """Announce a recording if one is wanted."""
        lead, warmup = self._lead(), warmup_of(self._options)
        reason, first = None, step + lead + warmup
        if self._scheduled is not None and self._scheduled - warmup <= step + lead:
            due, reason = self._scheduled, "on schedule"
            first = due if due - warmup >= step else first  # another recording was in its way
            self._scheduled = None if self._options.every is None else due + self._options.every
        elif self._asked is not None:
            reason, self._asked = self._asked, None
        elif self._options.on_demand or self._options.signal is not None:
            reason = take_request(self._run)
        if reason is None or self._is_full():
            return
        self._announcements.announce(
            RecordingInfo(
                number=self._number + 1,
                step=first,
                reason=reason,
                announced_at_step=step,
                attempt=self._attempt,
            ),
        )

    def _take_up(self, plan: RecordingInfo, step: int, options: RecordOptions) -> None:
        self._number = plan.number
        if plan.step - warmup_of(options) < step:
            self._file.tell(
                f"recording {plan.number} was due at step {plan.step}; this rank learned of it at step "
                f"{step} and is left out"
            )
            return
        options = msgspec.structs.replace(options, at_step=plan.step)
        run = str(self._run / recording_folder(plan.number))
        settings = msgspec.structs.replace(self._settings, run=run, options=options)
        self._own = ManifestFile(
            settings, self._identity, self._roots, self._watch, settled=step >= FIRST_SETTLED_STEP
        )
        self._own.folder.mkdir(parents=True, exist_ok=True)
        self._own.write()
        self._file.manifest.recordings.append(plan.number)
        self.current = Captures(self._own, options, self._roots)

    def _lead(self) -> int:
        times = [one.duration_ns for one in self._recent]
        return LEAST_LEAD if not times else max(LEAST_LEAD, math.ceil(LEAD_S * 1e9 / max(1, median(times))))

    def _is_full(self) -> bool:
        if self._limit is None or bytes_taken(self._run) < self._limit:
            return False
        self._file.tell(f"recordings take more than --max-size {self._options.max_size}: no more are made")
        return True


def _first(options: RecordOptions) -> int | None:
    """First step of the first recording on schedule; None where only requests and slow steps count."""
    if options.at_step is not None:
        return options.at_step
    return options.wait + warmup_of(options) if options.every is not None else None


def _nothing(options: RecordOptions) -> RecordOptions:
    return msgspec.structs.replace(options, active=0, memory=False, at_step=None)
