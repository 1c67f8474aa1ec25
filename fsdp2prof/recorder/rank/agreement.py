"""Agreements of ranks, through the store that their process groups met at.

Ranks that run different FSDP2 settings wait for collectives that never come, so no rank changes a setting
before all have said that they can. Ranks that record different steps cannot be compared, so what one of them
decides reaches all others at once; files on a shared disk may come late: NFS keeps for 30 s that a file is
not there.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec
import torch.distributed as dist

from fsdp2prof.manifest import RecordingInfo, RecordOptions
from fsdp2prof.recorder.settings import is_selected
from fsdp2prof.units import parse_bytes

PATIENCE = timedelta(seconds=120)
_STEP_PATIENCE = timedelta(seconds=20)
_SHARE = 4
"""Part of a collective's timeout that is waited at most: a rank that does not come waits in a collective."""
_STAYS, _STAYS_WITH = "stays", "stays_with"


Announcement: TypeAlias = RecordingInfo | int
"""A recording that is not on schedule, or the first step with which no recording begins any more."""


class Announcements:
    """What the leader decides on recordings, in order, for all ranks. Nothing here waits."""

    def __init__(self, attempt: int) -> None:
        name = f"fsdp2prof/recordings/{attempt}"
        self._store = _store_of_groups(name) or dist.PrefixStore(name, dist.HashStore())  # one rank
        self._announced = self._read = 0

    def announce(self, what: Announcement) -> None:
        """Tell all ranks, this one too; only the leader does."""
        self._store.set(str(self._announced), msgspec.json.encode(what).decode())
        self._announced += 1

    def read(self) -> Announcement | None:
        """Return the next announcement that this rank has not read; None where there is none yet."""
        key = str(self._read)
        if not self._store.check([key]):
            return None
        self._read += 1
        what: Announcement = msgspec.json.decode(self._store.get(key), type=RecordingInfo | int)
        return what

    def first_said(self, number: int) -> int:
        """Return the number that the first rank to call this gave."""
        return int(self._store.compare_set("first", "", str(number)))


class StepsThatFit:
    """How many steps ``--max-trace-size`` leaves: as many as fit on every rank that is recorded.

    Kineto counts nothing while it records, so a step is traced on its own before the others, and the size of
    its file says how many fit. Every rank leaves its number in the store when that step has ended, and reads
    the least when the first of the others begins: by then no rank waits for another to go on.
    """

    def __init__(self, options: RecordOptions, world_size: int, name: str) -> None:
        self._most = options.active
        self._limit = parse_bytes(options.max_trace_size or "")
        self._ranks = sum(is_selected(options.ranks, rank, world_size) for rank in range(world_size))
        self._name = f"fsdp2prof/fits/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
        self._store: Any = None
        self._has_said = False
        self.step_bytes: int | None = None
        """Of the file of one step; None until it is measured."""

    def measured(self, step_bytes: int) -> None:
        """Say how many steps of this size fit."""
        self.step_bytes = step_bytes
        self._say(self._own)

    def abstain(self) -> None:
        """Say that the number is not limited by this rank, which traces no step now. Does not wait."""
        self._say(self._most)

    def agreed(self) -> int:
        """Return how many steps fit on every rank. Raises ``RuntimeError`` if one does not say it in time."""
        if self._store is None:
            return self._own
        try:
            self._store.wait(["all"], _patience(self._store, _STEP_PATIENCE))
        except RuntimeError as error:
            raise RuntimeError("another rank did not say how many steps fit --max-trace-size") from error
        return next((steps for steps in range(self._own) if self._store.add(str(steps), 0)), self._own)

    @property
    def _own(self) -> int:
        size = self.step_bytes
        return self._most if not size else min(self._most, self._limit // size)

    def _say(self, steps: int) -> None:
        if self._has_said or (store := _store_of_groups(self._name)) is None:
            return
        self._store, self._has_said = store, True
        store.add(str(steps), 1)
        if store.add("ranks", 1) == self._ranks:
            store.set("all", "1")


def _store_of_groups(name: str) -> Any:
    """Return a part of the store that the process groups met at; None where there is none to share."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(name, store)


def _patience(store: Any, most: timedelta) -> timedelta:
    """Return how long a rank may wait here: its peers' collectives must not time out meanwhile."""
    timeout: timedelta = store.timeout  # of the process groups
    return min(most, timeout / _SHARE)


class LeftError(Exception):
    """A rank has left: nothing can be agreed on any more."""

    def __init__(self, stays_with: int) -> None:
        super().__init__("another rank could not continue")
        self.stays_with = stays_with
        """The candidate that is in force on the rank that left, for good; all others must also adopt it."""


class Agreement:
    """Rounds of votes among ``ranks``; every rank has to take part in every round, in the same order."""

    def __init__(self, ranks: Sequence[int], rank: int, attempt: int) -> None:
        self._count = len(ranks)
        self.leads = rank == min(ranks)
        """Whether this rank's word counts: the lowest of the mesh."""
        name = f"fsdp2prof/trial/{attempt}/{zlib.crc32(repr(sorted(ranks)).encode())}"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(name, store)
        self._round = 0

    def on(self, votes: Collection[str] = (), word: str = "") -> tuple[set[str], str]:
        """Return the votes that every rank cast, and the leader's ``word``.

        Raises :class:`LeftError` where a rank has left, torch's ``DistStoreError`` where one does not come
        within :data:`PATIENCE`.
        """
        votes = {*votes, _STAYS}
        number = self._cast(votes, word)
        self._store.wait([f"{number}/all"], _patience(self._store, PATIENCE))
        agreed = {vote for vote in votes if self._store.add(f"{number}/{vote}", 0) == self._count}
        if _STAYS not in agreed:
            raise LeftError(self._store.add(f"{number}/{_STAYS_WITH}", 0))
        return agreed - {_STAYS}, self._store.get(f"{number}/word").decode()

    def leave(self, stays_with: int = 0) -> None:
        """Have the others know, when they next come to agree, that this rank does not. Does not wait."""
        if stays_with:
            self._store.add(f"{self._round + 1}/{_STAYS_WITH}", stays_with)
        self._cast((), "")

    def _cast(self, votes: Collection[str], word: str) -> str:
        self._round += 1
        number = str(self._round)
        for vote in votes:
            self._store.add(f"{number}/{vote}", 1)
        if self.leads:
            self._store.set(f"{number}/word", word)
        if self._store.add(number, 1) == self._count:
            self._store.set(f"{number}/all", "1")
        return number
