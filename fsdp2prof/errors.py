"""Every error a user can meet, with its exit code.

::

    Fsdp2ProfError            exit 1
    ├── InputError            exit 1   a file, folder, model or config that cannot be used
    │   ├── TraceError                 a Kineto trace
    │   ├── SnapshotError              an allocator snapshot
    │   ├── FlightRecorderError        a Flight Recorder dump
    │   ├── RunDirectoryError          a run directory
    │   └── ModelError                 a model, mesh or policy that cannot be estimated
    ├── ClusterError          exit 1   workers elsewhere that cannot be used
    ├── UsageError            exit 2   options that contradict each other
    └── ThresholdError      exit 3   ``--fail-on`` held

The message is one line: what is wrong, where, and what to do. ``cli.main`` catches the tree
once and prints ``error: MESSAGE`` on stderr.
"""

from __future__ import annotations

import re

_LINE_BREAKS = re.compile(r"\s*[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
_LONG_WORD = re.compile(r"\S{400,}")
_LONGEST = 4000
"""Characters of a message, which may quote text of any length."""


class Fsdp2ProfError(Exception):
    """Base of every error that this package raises on purpose; its message is one line."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        line = _LINE_BREAKS.sub(" ", str(message))
        line = _LONG_WORD.sub(lambda word: f"{word[0][:200]}...{word[0][-40:]}", line)
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")


class InputError(Fsdp2ProfError):
    """Unusable input: missing, empty, truncated, or not of the kind its name suggests."""


class TraceError(InputError):
    """A file that is not a readable Kineto trace."""


class SnapshotError(InputError):
    """A file that is not a readable allocator snapshot, or a pickle with more than plain containers."""


class FlightRecorderError(InputError):
    """A file that is not a readable Flight Recorder dump, or a folder without any."""


class RunDirectoryError(InputError):
    """A run directory that is missing, empty, of a newer schema, or already exists."""


class ModelError(InputError):
    """A model, mesh or policy that is unknown, inconsistent, or not modelled."""


class ClusterError(Fsdp2ProfError):
    """A Dask cluster that does not answer, has no worker, or whose workers cannot do the work."""


class UsageError(Fsdp2ProfError):
    """Options that contradict each other or that need another option."""

    exit_code = 2


class ThresholdError(Fsdp2ProfError):
    """A ``--fail-on`` condition that holds."""

    exit_code = 3
