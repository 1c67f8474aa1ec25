"""Every error a user can meet, with its exit code.

::

    Fsdp2ProfError            exit 1
    ├── InputError            exit 1   a file, folder, model or config that cannot be used
    │   ├── TraceError                 a Kineto trace
    │   ├── SnapshotError              an allocator snapshot
    │   ├── FlightRecorderError        a Flight Recorder dump
    │   ├── RunDirectoryError          a run directory
    │   └── ModelError                 a model, mesh or policy that cannot be estimated
    ├── UsageError            exit 2   options that contradict each other
    └── ThresholdError      exit 3   ``--fail-on`` held

The message is one or two lines: what is wrong, where, and what to do. ``cli.main`` catches the tree
once and prints ``error: MESSAGE`` on stderr.
"""

from __future__ import annotations

__all__ = [
    "FlightRecorderError",
    "Fsdp2ProfError",
    "InputError",
    "ModelError",
    "RunDirectoryError",
    "SnapshotError",
    "ThresholdError",
    "TraceError",
    "UsageError",
]


class Fsdp2ProfError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class InputError(Fsdp2ProfError):
    """Input that cannot be used: missing, empty, truncated, or not what its name says."""


class TraceError(InputError):
    """A file that is not a readable Kineto trace."""


class SnapshotError(InputError):
    """A file that is not a readable allocator snapshot, or a pickle that wants more than containers."""


class FlightRecorderError(InputError):
    """A file that is not a readable Flight Recorder dump, or a folder without any."""


class RunDirectoryError(InputError):
    """A run directory that is missing, empty, of a newer schema, or already there."""


class ModelError(InputError):
    """A model, mesh or policy that is unknown, inconsistent, or not modelled."""


class UsageError(Fsdp2ProfError):
    """Options that contradict each other or miss their partner."""

    exit_code = 2


class ThresholdError(Fsdp2ProfError):
    """A ``--fail-on`` condition held."""

    exit_code = 3
