"""Several recordings in one run: when the next one is due, and that all ranks record the same steps.

Every rank knows from the options which steps are recorded on schedule, however far apart the ranks are.
Requests and slow steps lead to further recordings, which overlap none on schedule: on them, and on the end
that ``--max-size`` sets, the lowest selected rank decides, the leader. It announces both some steps ahead
(:class:`Announcements`), and every rank looks for announcements where a step begins. A rank that sees one
only after the recording was to begin leaves the recording out and says so.
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
    write_plan,
)
from fsdp2prof.recorder.settings import Settings, leader, length_of, warmup_of
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
"""Steps between an announcement and the recording. Ranks that wait for each other in collectives are at most
this far ahead of the leader."""
LEAD_S = 2.0
"""Seconds between them: short steps queue up on a device, and a host gets that far ahead."""
RECENT_STEPS = 100
"""Steps whose times are kept: what a slow one is compared with."""
LEAST_FOR_MEDIAN = 10
FIRST_SETTLED_STEP = 2
"""From it on every optimizer has stepped, and who updates what is known."""


class Recordings:
    """The recordings of one rank; :attr:`current` is the one that runs, or captures nothing."""

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
        self._warmup, self._length = warmup_of(settings.options), length_of(settings.options)
        self._leads = identity.rank == leader(settings.options.ranks, identity.world_size)
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._announcements: Announcements | None = None
        self._number = 0
        """Of the last recording that has begun, or was to begin."""
        self._scheduled = _first(self._options)
        self._announced: RecordingInfo | None = None
        self._end = math.inf
        """The first step with which no recording begins any more."""
        self._limit = None if self._options.max_size is None else parse_bytes(self._options.max_size)
        self._sized_before = -math.inf
        """The first step of the recording on schedule before which the size was last looked at."""
        self._recent: deque[StepInfo] = deque(maxlen=RECENT_STEPS)
        self._slow: str | None = None
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
                self._slow = f"step {step.step} took {times:.2f} times as long as the median before it"
        self._recent.append(step)

    def next_step(self, step: int) -> None:
        """End the recording that is over, and begin the one that is due, where ``step`` begins."""
        if self._announcements is None:
            self._announcements = Announcements(self._attempt)
            earlier = newest(self._run, before_attempt=self._attempt)
            self._number = self._announcements.first_said(earlier)
        decides = self._takes_requests or self._options.on_slow is not None or self._limit is not None
        if decides:
            self._read(self._announcements, step)
        plan = self._due(step)
        if plan is not None or self.current.is_over:
            self.end()
        signalled, self._signalled = self._signalled, False
        if self._own is None and signalled:
            request_recording(self._run, f"signal {self._options.signal}")
        if self._own is None and self._leads and decides:
            self._decide(self._announcements, step)
        if plan is None:
            return
        if plan is self._announced:
            self._announced = None
        elif self._scheduled is not None:
            every = self._options.every
            self._scheduled = None if every is None else self._scheduled + every
        self._take_up(plan, step, self._options)

    def begin(self, plan: RecordingInfo, traced: int) -> None:
        """Begin a recording that every rank plans alike: of ``traced`` steps and one of memory."""
        options = msgspec.structs.replace(self._options, warmup=1, active=traced, memory_steps=1)
        self._take_up(plan, plan.announced_at_step, options)

    def end(self) -> None:
        """End the recording that runs, if one does, whatever of it is there."""
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
        self._change(self._idle)

    @property
    def _takes_requests(self) -> bool:
        return self._options.on_demand or self._options.signal is not None

    def _read(self, announcements: Announcements, step: int) -> None:
        """Learn what the leader has decided."""
        while self._announced is None and (what := announcements.read()) is not None:
            if isinstance(what, int):
                self._end = what
            elif what.step - self._warmup >= step:
                self._announced = what
            else:
                self._file.tell(
                    f"recording {what.number} was due at step {what.step}; this rank learned of it at step "
                    f"{step} and skips it"
                )
                for number in range(what.number, self._number + 1):
                    self._file.tell(
                        f"recording {number} of this rank is recording {number + 1} of the others"
                    )
                self._number += 1

    def _decide(self, announcements: Announcements, step: int) -> None:
        """Announce a recording that is asked for, or that no more are made."""
        reason = self._asked_for() if self._announced is None else None
        if self._end < math.inf:
            return
        scheduled = math.inf if self._scheduled is None else self._scheduled - self._warmup
        begin = step + self._lead()
        if begin + self._length > scheduled:
            reason = None  # that one will do
        is_near = scheduled <= step + LEAST_LEAD and scheduled != self._sized_before
        if is_near:
            self._sized_before = scheduled
        elif reason is None:
            return
        if self._is_full():
            announcements.announce(step + LEAST_LEAD)
        elif reason is not None:
            plan = RecordingInfo(
                number=self._number + 1,
                step=begin + self._warmup,
                reason=reason,
                announced_at_step=step,
                attempt=self._attempt,
            )
            write_plan(self._run, plan)
            announcements.announce(plan)

    def _asked_for(self) -> str | None:
        """Return why a recording is wanted beside those on schedule; None if none is."""
        if self._slow is not None:
            reason, self._slow = self._slow, None
            return reason
        return take_request(self._run) if self._takes_requests else None

    def _due(self, step: int) -> RecordingInfo | None:
        """Return the recording that begins with ``step``, if one does."""
        plan, scheduled = self._announced, self._scheduled
        if plan is not None and plan.step - self._warmup == step:
            return plan
        if scheduled is None or scheduled - self._warmup > step or step >= self._end:
            return None
        number = self._number + 1
        return RecordingInfo(number=number, step=scheduled, reason="on schedule", attempt=self._attempt)

    def _take_up(self, plan: RecordingInfo, step: int, options: RecordOptions) -> None:
        self._number = plan.number
        if self._leads:
            write_plan(self._run, plan)
        options = msgspec.structs.replace(options, at_step=plan.step)
        run = str(self._run / recording_folder(plan.number))
        settings = msgspec.structs.replace(self._settings, run=run, options=options)
        self._own = ManifestFile(
            settings, self._identity, self._roots, self._watch, settled=step >= FIRST_SETTLED_STEP
        )
        self._own.folder.mkdir(parents=True, exist_ok=True)
        self._own.write()
        self._file.manifest.recordings.append(plan.number)
        self._change(Captures(self._own, options, self._roots))

    def _change(self, captures: Captures) -> None:
        captures.inherit(self.current)
        self.current = captures

    def _lead(self) -> int:
        times = [one.duration_ns for one in self._recent]
        return LEAST_LEAD if not times else max(LEAST_LEAD, math.ceil(LEAD_S * 1e9 / max(1, median(times))))

    def _is_full(self) -> bool:
        if self._limit is None or bytes_taken(self._run) < self._limit:
            return False
        self._file.tell(f"recordings exceed --max-size {self._options.max_size}: no further one begins")
        return True


def _first(options: RecordOptions) -> int | None:
    """First step of the first recording on schedule; None where only requests and slow steps count."""
    if options.at_step is not None:
        return options.at_step
    return options.wait + warmup_of(options) if options.every is not None else None


def _nothing(options: RecordOptions) -> RecordOptions:
    return msgspec.structs.replace(options, active=0, memory=False, at_step=None)
