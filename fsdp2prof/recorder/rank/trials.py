"""``try``: other FSDP2 settings in a training that runs, step by step, and how long their steps take.

Blocks of steps alternate between the script's own settings and each candidate. The order comes from a seed,
so that it is the same on every rank, and every change of settings is agreed on before it is made
(:class:`Agreement`). Nothing here changes what a step computes; the script's settings are back at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch

from fsdp2prof.files import write_json
from fsdp2prof.manifest import RecordingInfo, StepInfo, TrialOptions
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.model.live_settings import Candidate, LiveSettings, NotTriedError
from fsdp2prof.recorder.model.roots import Root, Roots, param_groups
from fsdp2prof.recorder.rank.agreement import Agreement, LeftError
from fsdp2prof.recorder.settings import ALIVE_VARIABLE, VARIABLE
from fsdp2prof.run_directory import TRIAL_FILE
from fsdp2prof.trial import (
    OWN_SETTINGS,
    LeftOut,
    Trial,
    TriedBlock,
    is_decided,
    parse_candidate,
    why_never_tried,
)

SETTLED_STEPS = 2
"""Steps before the trial: the first ones allocate, compile and initialise."""
MARKED_STEPS = 2
"""Steps in which the order of forwards is noted: of the second it is certain that no evaluation is in it."""
BLOCK_STEPS = 3
"""Timed steps of a block; one before them is left out."""
RECORD_WARMUP = 1
OWN_TRACED_STEPS = 3
"""Traced steps with the script's settings, from which ``whatif`` predicts; a candidate has one."""
MEMORY_STEPS = 1
ASK_EVERY = 5
"""Steps between two looks for the candidates that ``whatif`` chooses."""
ASK_TIMES = 200
MEMORY_MARGIN = 0.9
"""Part of the free device memory that a candidate may take."""
LEAST_ROUNDS = 8
"""Rounds before a trial may end early."""


class _Next(NamedTuple):
    """What the next step is for."""

    round: int = -1
    candidate: int = 0
    timed: bool = False


class _EndedError(Exception):
    """The trial cannot go on; the message says why."""


class Trials:
    """The trial of one rank.

    ``record`` begins a recording of so many traced steps with the next step, ``recorded`` ends it; ``tell``
    keeps a message.
    """

    def __init__(
        self,
        options: TrialOptions,
        identity: Identity,
        roots: Roots,
        folder: Path,
        *,
        record: Callable[[RecordingInfo, int], None],
        recorded: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self._options, self._identity, self._roots, self._folder = options, identity, roots, folder
        self._record, self._recorded, self._tell = record, recorded, tell
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._clock = _DeviceClock() if torch.cuda.is_initialized() else _HostClock()  # type: ignore[no-untyped-call]
        self._trial = Trial(
            rank=identity.rank, seed=options.seed, clock=self._clock.name, candidates=[OWN_SETTINGS]
        )
        self._live: LiveSettings | None = None
        self._agreement: Agreement | None = None
        self._candidates: list[Candidate] = []
        self._now = 0
        self._next = _Next()
        self._step = 0
        self._left_of_block = 0
        self._failed: str | None = None
        self._forwards = self._micro_batches = 0
        self._course: Iterator[_Next] | None = self._steps()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is tried."""
        return self._course is None

    def forward(self) -> None:
        """A forward of a root with gradients begins."""
        self._forwards += 1
        if self._live is not None and self._candidates and self._candidates[self._now].reduces_last:
            self._live.reduce(self._forwards >= self._micro_batches)

    def step(self, ended: StepInfo) -> None:
        """End a step and choose the settings of the next. Does not raise: a failure ends the trial."""
        if self._course is None:
            return
        self._step = ended.step + 1
        self._left_of_block -= 1
        self._micro_batches, self._forwards = self._forwards, 0
        if self._failed is not None:
            if self._left_of_block <= 0:
                self._give_up()
            return
        try:
            self._clock.ended(self._next, ended)
            self._next = next(self._course)
        except StopIteration:
            self._course = None
        except _EndedError as error:
            self._end(str(error))
        except LeftError as error:
            self._end(str(error), error.stays_with)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._failed = f"the trial failed in step {ended.step}: {reason}"
            if self._left_of_block <= 0:
                self._give_up()

    def abandon(self) -> None:
        """Stop at once, in the middle of a step perhaps: what is in force stays in force, on all ranks.

        A rank that went back alone would wait for collectives that the others do not make.
        """
        if self._course is None:
            return
        self._course = None
        if self._agreement is not None:
            self._agreement.leave(stays_with=self._now)
        self._trial.ended = self._stays_text("the recording failed", self._now)
        self._save()

    def close(self) -> None:
        """The training ends: keep what was measured."""
        if self._course is not None:
            self._course = None
            self._save()

    def _steps(self) -> Iterator[_Next]:
        """What each step is for, from the second step on."""
        for _ in range(SETTLED_STEPS - 1):
            yield _Next()
        self._roots.mark(True)
        for _ in range(MARKED_STEPS):
            yield _Next()
        self._roots.mark(False)
        roots = self._trained_roots()
        self._agreement = Agreement(_ranks(roots[0]), self._identity.rank, self._attempt)
        texts = list(self._options.candidates)
        recorded_first = not texts
        if recorded_first:
            yield from self._recording(0)
            texts = yield from self._chosen()
        self._prepare(roots, texts)
        rounds = self._options.steps // (len(self._candidates) * (1 + BLOCK_STEPS))
        why = f"the trial's {self._options.steps} steps are over"
        for number in range(rounds):
            if number and self._is_decided(number):
                why = f"decided after {number} rounds"
                break
            order = list(range(len(self._candidates)))
            Random(f"{self._options.seed}/{number}").shuffle(order)
            for candidate in order:
                self._switch(candidate)
                self._left_of_block = 1 + BLOCK_STEPS
                yield _Next(number, candidate)
                for _ in range(BLOCK_STEPS):
                    yield _Next(number, candidate, timed=True)
            self._save()
        for candidate in range(len(self._candidates)):
            if candidate or not recorded_first:
                self._switch(candidate)
                yield from self._recording(candidate)
        self._switch(0)
        self._end(why)

    def _trained_roots(self) -> list[Root]:
        roots = [root for root in self._roots if root.forward_order]
        if not roots:
            raise _EndedError("no sharded model ran forward and backward")
        return roots

    def _prepare(self, roots: Sequence[Root], texts: Sequence[str]) -> None:
        """Turn the candidates into assignments; only those stay that every rank can have."""
        assert self._agreement is not None
        self._live = LiveSettings(roots)
        found: dict[str, Candidate] = {}
        for text in texts:
            try:
                if (reason := self._why_not(text)) is not None:
                    raise NotTriedError(reason)
                found[text] = self._live.candidate(text)
            except NotTriedError as error:
                self._trial.left_out.append(LeftOut(change=text, reason=str(error)))
        agreed, _ = self._agreement.on(found)
        for text in found:
            if text not in agreed:
                self._trial.left_out.append(LeftOut(change=text, reason="another rank does not support it"))
        kept = [text for text in found if text in agreed]
        self._trial.candidates = [OWN_SETTINGS, *kept]
        self._candidates = [self._live.original, *(found[text] for text in kept)]
        if not kept:
            raise _EndedError("no candidate can be tried")

    def _why_not(self, text: str) -> str | None:
        assert self._live is not None
        reason = why_never_tried(text, changes_results=self._options.changes_results)
        name, value = parse_candidate(text)
        if reason is None and name == "sync" and self._micro_batches < 2:
            return "a step has one micro-batch"
        if reason is None and name == "reshard" and value != "always" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            free, _ = torch.cuda.mem_get_info()
            unused = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
            if self._live.full_bytes > MEMORY_MARGIN * (free + max(0, unused)):
                return "may not fit: all parameters gathered exceed the free memory"
        return reason

    def _switch(self, candidate: int) -> None:
        """Change to a candidate. Raises where a rank cannot, before any rank runs a step with it."""
        assert self._agreement is not None
        if not all(one.holds for one in self._candidates[self._now].assignments):
            self._agreement.leave()
            raise _EndedError("the script changes FSDP2's settings itself")
        self._assign(candidate)
        self._agreement.on()

    def _assign(self, candidate: int) -> None:
        """Put a candidate in force; an attribute that the script has changed meanwhile stays the script's."""
        before = self._candidates[self._now]
        if before.reduces_last and self._live is not None:
            self._live.reduce(True)
        changed = {(id(one.owner), one.name) for one in before.assignments if not one.holds}
        for one in self._candidates[candidate].assignments:
            if (id(one.owner), one.name) not in changed:
                setattr(*one)
        self._now = candidate

    def _give_up(self) -> None:
        """After a failure, where the others are about to agree: have them know it, and restore."""
        reason, self._failed = self._failed, None
        try:
            if self._agreement is not None:
                self._agreement.leave()
        except Exception as error:  # the store is gone, and the other ranks soon will be
            reason = f"{reason}; the other ranks were not informed ({error})"
        self._end(str(reason))

    def _end(self, why: str, candidate: int = 0) -> None:
        if self._candidates:
            self._assign(candidate)
        self._trial.restored = not candidate
        self._trial.ended = self._stays_text(why, candidate) if candidate else why
        self._course = None
        self._recorded()
        self._save()
        settings = "" if candidate else "; the script's own settings are in force"
        self._tell(f"trial: {self._trial.ended}{settings}")

    def _stays_text(self, why: str, candidate: int) -> str:
        text = self._trial.candidates[candidate]
        return f"{why}; {text} stays in force on every rank" if text else why

    def _save(self) -> None:
        self._trial.blocks += self._clock.take()
        write_json(self._folder / TRIAL_FILE, self._trial)

    def _is_decided(self, rounds: int) -> bool:
        """Whether more steps would not change which candidate is best: the mesh's first rank says so."""
        assert self._agreement is not None
        decided = False
        if self._agreement.leads and rounds >= LEAST_ROUNDS:
            decided = is_decided(self._trial.blocks, len(self._candidates))
        _, word = self._agreement.on(word="decided" if decided else "")
        return word == "decided"

    def _recording(self, candidate: int) -> Iterator[_Next]:
        """Record traced steps and one step of memory with the settings in force."""
        number = len(self._trial.recordings) + 1
        text = self._trial.candidates[candidate] if candidate else ""
        traced = 1 if candidate else OWN_TRACED_STEPS
        self._record(
            RecordingInfo(
                number=number,
                step=self._step + RECORD_WARMUP,
                reason=f"trial of {text}" if text else "trial: the script's own settings",
                announced_at_step=self._step,
                attempt=self._attempt,
            ),
            traced,
        )
        self._left_of_block = RECORD_WARMUP + traced + MEMORY_STEPS
        for _ in range(self._left_of_block):
            yield _Next()
        self._recorded()
        self._trial.recordings[text] = number
        self._save()

    def _chosen(self) -> Generator[_Next, None, list[str]]:
        """Wait for the candidates that ``whatif`` chooses from the first recording, beside the training."""
        assert self._agreement is not None
        leads = self._agreement.leads
        chooser = _Chooser(self._folder, self._options) if leads else None
        for _ in range(ASK_TIMES):
            for _ in range(ASK_EVERY):
                yield _Next()
            word = json.dumps(chooser.answer()) if chooser is not None else ""
            _, word = self._agreement.on(word=word)
            answer = json.loads(word)
            if isinstance(answer, str):
                raise _EndedError(answer)
            if answer is not None:
                return [str(text) for text in answer]
        raise _EndedError("whatif chose no candidate while the training ran")


def predict_command(run: Path) -> list[str]:
    """Return the command that prints, as JSON, what each change gains in a run's first recording."""
    options = ["--iteration", "1", "--format", "json", "-q"]
    return [sys.executable, "-m", "fsdp2prof", "whatif", str(run), *options]


class _Chooser:
    """The process that predicts each change on the first recording."""

    def __init__(self, folder: Path, options: TrialOptions) -> None:
        self._best = options.best
        self._path = folder / "candidates.json"
        environment = {
            name: text for name, text in os.environ.items() if name not in (VARIABLE, ALIVE_VARIABLE)
        }
        with self._path.open("wb") as out:
            self._process = subprocess.Popen(
                predict_command(folder.parent),
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
            )

    def answer(self) -> list[str] | str | None:
        """Return the best candidates, why there are none, or None as long as it works."""
        if self._process.poll() is None:
            return None
        try:
            if self._process.returncode:
                return "whatif could not read the first recording"
            tried = json.loads(self._path.read_text())["tried"]
        finally:
            self._path.unlink(missing_ok=True)
        gains = {one["change"]: one["gained_ns"] or 0.0 for one in tried if _can_try(one["change"])}
        best = sorted((text for text in gains if gains[text] > 0), key=lambda text: -gains[text])[
            : self._best
        ]
        return best or "whatif predicts a gain for no setting that can change while the training runs"


def _can_try(text: str) -> bool:
    try:
        return why_never_tried(text, changes_results=False) is None
    except Exception:  # another network, other devices
        return False


class _HostClock:
    """Steps as the host sees them."""

    name: Literal["host", "device"] = "host"

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], TriedBlock] = {}

    def ended(self, purpose: _Next, step: StepInfo) -> None:
        """Keep the duration of a step that was timed."""
        if purpose.timed and step.kind == "plain":
            self._add(purpose, step.step, step.duration_ns)

    def take(self) -> list[TriedBlock]:
        """Return the blocks whose times are known, and forget them."""
        blocks, self._blocks = self._blocks, {}
        return list(blocks.values())

    def _add(self, purpose: _Next, step: int, duration_ns: int) -> None:
        key = (purpose.round, purpose.candidate)
        if key not in self._blocks:
            self._blocks[key] = TriedBlock(
                candidate=purpose.candidate, round=purpose.round, first_step=step, durations_ns=[]
            )
        self._blocks[key].durations_ns.append(duration_ns)


class _DeviceClock(_HostClock):
    """Steps as the compute stream sees them, from an event at each boundary; nothing is waited for."""

    name = "device"

    def __init__(self) -> None:
        super().__init__()
        self._last: Any = None
        self._pending: list[tuple[_Next, int, Any, Any]] = []

    def ended(self, purpose: _Next, step: StepInfo) -> None:
        """Mark the boundary; the time is known when the device has reached it."""
        made: Any = torch.cuda.Event
        event = made(enable_timing=True)
        event.record()
        if purpose.timed and step.kind == "plain" and self._last is not None:
            self._pending.append((purpose, step.step, self._last, event))
        self._last = event

    def take(self) -> list[TriedBlock]:
        """Return the blocks whose events have all happened."""
        if self._pending and not self._pending[-1][3].query():
            self._pending[-1][3].synchronize()  # the first step of the next block is left out anyway
        for purpose, step, before, after in self._pending:
            self._add(purpose, step, round(before.elapsed_time(after) * 1e6))
        self._pending.clear()
        return super().take()


def _ranks(root: Root) -> list[int]:
    """Ranks that the root's parameters are sharded and replicated over."""
    for state in root.states:
        for group in param_groups(state):
            return [int(rank) for rank in group.mesh_info.mesh.mesh.flatten().tolist()]
    raise _EndedError("the model has no sharded parameter")
