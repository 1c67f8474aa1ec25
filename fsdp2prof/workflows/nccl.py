"""Analyse the Inspector logs and NCCL_DEBUG logs at a path."""

from __future__ import annotations

from pathlib import Path

from fsdp2prof.analyzers.nccl.analysis import analyze_nccl as analyze
from fsdp2prof.errors import InputError
from fsdp2prof.readers.job.nccl_inspector import looks_like_inspector, read_inspector
from fsdp2prof.readers.job.nccl_log import looks_like_nccl_log, read_nccl_logs
from fsdp2prof.readers.run.directory import is_run_directory, open_run
from fsdp2prof.results.nccl import NcclAnalysis
from fsdp2prof.tables.nccl import InspectedProcess
from fsdp2prof.workflows.job.folders import files_below


def analyze_nccl(path: str | Path, *, run: str | Path | None = None) -> NcclAnalysis:
    """Read every NCCL file at a path: Inspector logs, ``NCCL_DEBUG`` logs, or both.

    ``path`` is one such file or a folder of them; ``run`` is the run directory whose manifests name layers
    and mesh dimensions, by default ``path`` itself if it is one. Raises ``InputError`` for a path without
    any.
    """
    root = Path(path)
    if not root.exists():
        raise InputError(f"{root}: no such file or folder")
    inspected: list[Path] = []
    logs: list[Path] = []
    for file in [root] if root.is_file() else files_below(root):
        if looks_like_inspector(file):
            inspected.append(file)
        elif looks_like_nccl_log(file):
            logs.append(file)
    if not inspected and not logs:
        raise InputError(
            f"{root}: no NCCL logs found: run with NCCL_DEBUG=INFO "
            "NCCL_DEBUG_SUBSYS=INIT,ENV,NET,GRAPH,COLL,TUNING NCCL_DEBUG_FILE=nccl.%h.%p, "
            "or with the Inspector plugin and NCCL_INSPECTOR_ENABLE=1"
        )
    processes: list[InspectedProcess] = []
    warnings: list[str] = []
    for file in inspected:
        try:
            processes.append(read_inspector(file))
        except InputError as error:
            warnings.append(f"left out: {error}")
    if not processes and not logs:
        raise InputError(warnings[0].removeprefix("left out: "))
    source = root if run is None else Path(run)
    asked = run is not None or is_run_directory(root)
    records = open_run(source).ranks if asked else ()
    manifests = {one.rank: one.manifest for one in records if one.manifest is not None}
    return analyze(processes, read_nccl_logs(logs), manifests, warnings)
