"""A Dask cluster that reduces ranks: one on this machine, or one with a scheduler's address.

A function and one rank's work go to a worker and its result comes back. No more tasks are in flight than
keep every worker busy, so that neither the scheduler nor this process accumulates results. Another worker
repeats the unfinished tasks of a worker that died.
"""

from __future__ import annotations

import logging
import pickle
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import fsdp2prof
from fsdp2prof.errors import ClusterError, Fsdp2ProfError, UsageError
from fsdp2prof.worker_processes import usable_cores

Item = TypeVar("Item")
T = TypeVar("T")

LOCAL = "local"
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^\s]+:\d+")
_CONNECT_S = 15
_WORKERS_S = 60
_AHEAD = 3
"""Pieces of work on the way for each thread of the workers: enough that none waits for the next."""


class LostError(Fsdp2ProfError):
    """A task that crashed every worker that ran it."""


def check_address(address: str) -> str:
    """Return ``local`` or a scheduler's address unchanged. Raises ``UsageError`` for anything else."""
    if address != LOCAL and _ADDRESS.fullmatch(address) is None:
        raise UsageError(f"--cluster {address}: not local, and not a scheduler's address (tcp://HOST:8786)")
    return address


@contextmanager
def open_cluster(address: str, workers: int | None = None) -> Iterator[Cluster]:
    """Connect to a scheduler, or start ``workers`` processes here (``local``; by default one a core).

    Raises ``ClusterError`` where Dask is not installed, no scheduler answers or there is no worker.
    """
    check_address(address)
    try:
        distributed: Any = import_module("distributed")
    except ImportError:
        raise ClusterError("--cluster needs Dask: pip install 'fsdp2prof[cluster]'") from None
    if address != LOCAL and workers is not None:
        raise UsageError("--jobs would have no effect: the cluster's own workers share the ranks")
    if (
        address.startswith("tls:")
        and distributed.Security().get_connection_args("client")["ssl_context"] is None
    ):
        names = ", ".join(
            f"DASK_DISTRIBUTED__COMM__TLS__{name}" for name in ("CA_FILE", "CLIENT__CERT", "CLIENT__KEY")
        )
        raise ClusterError(f"--cluster {address}: no TLS certificates: set {names}")
    local = None
    try:
        if address == LOCAL:
            local = distributed.LocalCluster(
                n_workers=workers or usable_cores(),
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,
                security=_own_keys(),
            )
        client = distributed.Client(local or address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, RuntimeError, ValueError) as error:
        if local is not None:
            local.close()
        raise ClusterError(f"--cluster {address}: cannot connect: {_first_line(error)}") from None
    try:
        yield Cluster(client, address)
    finally:
        client.close()
        if local is not None:
            local.close()


class Cluster:
    """Workers that have this package in this version."""

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address
        try:
            client.wait_for_workers(1, timeout=_WORKERS_S)
        except TimeoutError:
            raise ClusterError(f"--cluster {address}: it has no worker") from None
        self._require_same_version()

    def map(self, function: Callable[[Item], T], items: Sequence[Item]) -> Iterator[T | LostError]:
        """Yield ``function(item)`` in the order of the items, or the reason why an item failed.

        Raises this package's errors from the function, and ``ClusterError`` for any other.
        """
        rest = iter(items)
        waiting = deque(self._submit(function, islice(rest, self._at_once())))
        while waiting:
            future = waiting.popleft()
            yield self._brought(future)
            del future
            waiting.extend(self._submit(function, islice(rest, max(0, self._at_once() - len(waiting)))))

    def _brought(self, future: Any) -> Any:
        """Return a worker's result and release it there; for lost work, the error."""
        try:
            packed = future.result()
        except Exception as error:
            return self._lost(error)
        future.release()
        return pickle.loads(zlib.decompress(packed))

    def require_files(self, locations: Iterable[str]) -> None:
        """Raise ``ClusterError`` unless every worker can read these files, if they are on a disk."""
        from functools import partial

        for location in locations:
            seen = self._client.run(partial(_is_file, location))
            blind = sorted(worker for worker, there in seen.items() if not there)
            if blind:
                raise ClusterError(
                    f"{location}: worker {blind[0]} cannot read it: RUN must be on a disk that all workers "
                    "share, or at a URL"
                )

    def _lost(self, error: Exception) -> LostError:
        """Say that work was lost, if an error says so; raise any other."""
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            return LostError("every worker that read it died, perhaps of too little memory")
        if isinstance(error, Fsdp2ProfError):
            raise error
        raise ClusterError(
            f"--cluster {self._address}: {type(error).__name__}: {_first_line(error)}"
        ) from error

    def _submit(self, function: Callable[[Item], T], items: Iterable[Item]) -> list[Any]:
        return [self._client.submit(_packed, function, item, pure=False) for item in items]

    def _at_once(self) -> int:
        return max(1, _AHEAD * sum(map(int, self._client.nthreads().values())))

    def _require_same_version(self) -> None:
        versions = self._client.run(_version, on_error="return")
        for worker, version in sorted(versions.items()):
            if isinstance(version, Exception):
                raise ClusterError(
                    f"worker {worker} cannot import fsdp2prof ({_first_line(version)}): "
                    f"install fsdp2prof {fsdp2prof.__version__} there"
                )
            if version != fsdp2prof.__version__:
                raise ClusterError(
                    f"worker {worker} has fsdp2prof {version}, here it is {fsdp2prof.__version__}"
                )


def _packed(function: Callable[[Any], Any], item: Any) -> bytes:
    """On a worker: call the function and compress its result for the way back."""
    return zlib.compress(pickle.dumps(function(item), pickle.HIGHEST_PROTOCOL), 1)


def _version() -> str:
    return fsdp2prof.__version__


def _is_file(location: str) -> bool:
    return "://" in location or Path(location).is_file()


def _own_keys() -> bool | None:
    """Whether a local cluster can have its own keys, so that no other user of the machine can connect."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        return None
    return True


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
