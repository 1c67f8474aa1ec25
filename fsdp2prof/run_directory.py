"""A run directory: where its files stand, and what a recorded run is once its manifests are read.

::

    RUN/run.json                       RunInfo
    RUN/run-node-00001.json            RunInfo of a further node's launcher
    RUN/rank-00000/manifest.json       RankManifest
    RUN/rank-00000/trace.json.gz       Kineto trace of the recorded steps
    RUN/rank-00000/memory.pickle       CUDA allocator snapshot, or
    RUN/rank-00000/memory.npz          the exact storage count of a CPU run
    RUN/rank-00000/summary.json        RunAnalysis of the rank, where ``--summary`` keeps no more
    RUN/rank-00000/steps.jsonl         a WatchedStep a line, of every step, with ``--watch``
    RUN/rank-00000/trial.json         a Trial, where settings were tried in the running job
    RUN/rank-00000/errors.txt          tracebacks of what failed in the recorder
    RUN/communication.json             CommEstimate, in an estimate saved as a run only
    RUN/recording-0001/recording.json  RecordingInfo, in a run that may record several times; beside it
    RUN/recording-0001/rank-00000/     what a rank recorded then, as above

The recorder and the readers take every name from here. Times are nanoseconds, sizes bytes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from fsdp2prof.manifest import RankManifest, RunInfo

RUN_FILE = "run.json"
NODE_FILES = "run-node-*.json"
MANIFEST_FILE = "manifest.json"
TRACE_FILE = "trace.json.gz"
SNAPSHOT_FILE = "memory.pickle"
OOM_SNAPSHOT_FILE = "oom.pickle"
PACKED = ".gz"
"""End of the names of snapshots that somebody packed."""
"""Written beside the recording of the memory steps when a later step runs out of memory."""
STORAGE_COUNT_FILE = "memory.npz"
SUMMARY_FILE = "summary.json"
STEPS_FILE = "steps.jsonl"
TRIAL_FILE = "trial.json"
FLIGHT_RECORDER_FILE = "fr.json"
"""The last collectives of a rank that stood still, crashed or was told to end."""
FLIGHT_RECORDER_FOLDER = "flight-recorder"
"""Of the run; where NCCL's watchdog writes its own dumps when a collective times out."""
STACKS_FILE = "stacks.txt"
"""Its threads' Python stacks at that moment."""
ERRORS_FILE = "errors.txt"
"""Tracebacks of the recorder's own failures, each of which switched a part of it off."""
RECORDING_FILE = "recording.json"
TRIGGER_FILE = "trigger.json"
"""Asks a running job for a recording; its first rank takes it away."""
COMMUNICATION_FILE = "communication.json"
"""Of an estimate saved as a run: the predicted collectives of a step."""


def rank_folder(rank: int) -> str:
    """Name of a rank's folder in a run directory."""
    return f"rank-{rank:05d}"


def recording_folder(number: int) -> str:
    """Name of the folder of one of several recordings; they count from 1."""
    return f"recording-{number:04d}"


def recording_number(name: str) -> int | None:
    """Number of the recording whose folder has a name; None for other names."""
    number = name.removeprefix("recording-")
    if number == name or not (number.isascii() and number.isdigit() and 4 <= len(number) <= 9):
        return None
    return int(number) if recording_folder(int(number)) == name else None


def node_file(node_rank: int) -> str:
    """Name of what one node's launcher says of its part of the run; node 0 writes ``run.json``."""
    return f"run-node-{node_rank:05d}.json" if node_rank else RUN_FILE


@dataclass(frozen=True, slots=True)
class PackedManifest:
    """A manifest in a few kilobytes: a process may have those of thousands of ranks at hand."""

    content: bytes

    @classmethod
    def of(cls, content: bytes) -> PackedManifest:
        """Pack a manifest that is known to be one, as JSON."""
        return cls(zlib.compress(content, 1))

    @property
    def manifest(self) -> RankManifest:
        """What was packed; not to be changed."""
        return _unpacked(self.content)


@lru_cache(maxsize=64)
def _unpacked(content: bytes) -> RankManifest:
    return msgspec.json.decode(zlib.decompress(content), type=RankManifest)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """What one rank left in the run directory."""

    rank: int
    path: Path
    packed: PackedManifest | None
    """None where the rank never came to life or its manifest cannot be read."""
    trace: Path | None
    memory: Path | None
    """``memory.pickle`` (CUDA snapshot) or ``memory.npz`` (storage count)."""
    summary: Path | None = None
    """Where one file serves both."""
    messages: tuple[str, ...] = ()

    @property
    def manifest(self) -> RankManifest | None:
        """What the rank said of itself; not to be changed."""
        return None if self.packed is None else self.packed.manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """A recorded run: what its launchers said and its ranks in order, the missing ones left out."""

    path: Path
    info: RunInfo
    ranks: tuple[RankRecord, ...]
    messages: tuple[str, ...] = ()
    """What a person should know, the ranks' own messages included."""
    recordings: tuple[int, ...] = ()
    """Numbers of its recordings, where it may have several."""

    def rank(self, rank: int) -> RankRecord | None:
        """Return one rank's record, or None where it left nothing."""
        return next((record for record in self.ranks if record.rank == rank), None)
