"""``python -m fsdp2prof.workflows.summarise_rank FOLDER``: analysis that ``record --summary`` runs beside
a training.

Analyses the recording of one rank, writes ``summary.json`` into its folder and removes the recording. If
the analysis fails, the recording stays.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from fsdp2prof.errors import Fsdp2ProfError, RunDirectoryError
from fsdp2prof.files import write_json
from fsdp2prof.readers.run.directory import open_rank
from fsdp2prof.run_directory import SNAPSHOT_FILE, STORAGE_COUNT_FILE, SUMMARY_FILE, TRACE_FILE
from fsdp2prof.workflows.analyze import analyze_run
from fsdp2prof.workflows.job.job_files import JobFiles

_NICE = 19


def summarise_rank(folder: Path) -> None:
    """Replace a rank's recording by its analysis. Raises the errors of ``analyze run``."""
    run = open_rank(folder)
    result = analyze_run(JobFiles(folder, run, None, None), workers=1, what_if=False)
    for record in run.ranks:
        if (record.trace and result.trace is None) or (record.memory and result.memory is None):
            raise RunDirectoryError(f"{folder}: {result.warnings[0]}")
    # where ranks stand and who holds what the manifests of all ranks say, later
    kept = replace(result, run=replace(result.run, path=str(folder)), sharding=None, mesh=None)
    write_json(folder / SUMMARY_FILE, kept)
    for name in (TRACE_FILE, SNAPSHOT_FILE, STORAGE_COUNT_FILE):
        (folder / name).unlink(missing_ok=True)


if __name__ == "__main__":
    os.nice(_NICE)
    try:
        summarise_rank(Path(sys.argv[1]))
    except Fsdp2ProfError as error:
        sys.exit(str(error))
