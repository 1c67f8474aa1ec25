"""Evaluate a run in which settings were tried: measured gains beside the predictions of ``whatif``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fsdp2prof.analyzers.trial import Prediction, analyze_trial
from fsdp2prof.errors import Fsdp2ProfError, InputError, RunDirectoryError
from fsdp2prof.readers.run.directory import is_run_directory
from fsdp2prof.results.trial import TrialResult
from fsdp2prof.run_directory import TRIAL_FILE
from fsdp2prof.trial import OWN_SETTINGS, TRIAL_SCHEMA, Trial
from fsdp2prof.workflows.job.job_files import JobFiles, open_job
from fsdp2prof.workflows.ranks.one_rank import RankWork, reduce_rank
from fsdp2prof.workflows.whatif import what_if

_LARGEST = 64 << 20


def trial_of_run(path: Path) -> TrialResult:
    """Read the measurements of a run's ranks. Raises ``InputError`` if no setting was tried in it."""
    if not is_run_directory(path):
        raise InputError(f"{path}: not a run directory")
    files = sorted(path.glob(f"rank-*/{TRIAL_FILE}"))
    if not files:
        raise InputError(f"{path}: no setting was tried in this run; record it with fsdp2prof try")
    trials, warnings = [], []
    for file in files:
        try:
            trials.append(_read(file))
        except RunDirectoryError as error:
            warnings.append(str(error))
    if not trials:
        raise InputError(warnings[0])
    recordings = min(trials, key=lambda one: one.rank).recordings
    texts = [text for text in trials[0].candidates if text != OWN_SETTINGS]
    predicted: dict[str, Prediction] = {}
    peaks: dict[str, int] = {}
    for text, number in recordings.items():
        try:
            job = open_job(path, iteration=number)
            if (peak := _peak(job)) is not None:
                peaks[text] = peak
            if text == OWN_SETTINGS:
                predicted = _predictions(job, texts)
        except Fsdp2ProfError as error:
            warnings.append(str(error))
    return analyze_trial(str(path), trials, predicted=predicted, peaks=peaks, warnings=warnings)


def _read(file: Path) -> Trial:
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
        trial = msgspec.json.decode(content, type=Trial)
    except (OSError, msgspec.DecodeError, RecursionError, ValueError) as error:
        raise RunDirectoryError(f"{file}: cannot be read ({error})") from error
    if trial.schema != TRIAL_SCHEMA:
        raise RunDirectoryError(f"{file}: its schema is {trial.schema!r}, not {TRIAL_SCHEMA!r}")
    return trial


def _peak(job: JobFiles) -> int | None:
    """Bytes of the rank with the highest peak; None if no memory was recorded."""
    packed = job.packed_manifests
    works = [
        RankWork(packed=packed.get(file.rank), trace=None, memory=(file,), options={})
        for file in job.memory.files
    ]
    peaks = [peak for work in works if (peak := reduce_rank(work).peak_bytes) > 0]
    return max(peaks, default=None)


def _predictions(job: JobFiles, texts: list[str]) -> dict[str, Prediction]:
    predicted = {}
    for text in texts:
        try:
            result = what_if(job, settings=[text])
        except Fsdp2ProfError as error:
            predicted[text] = Prediction(gained_ns=None, reason=str(error))
        else:
            tried = result.tried[0]
            predicted[text] = Prediction(
                gained_ns=tried.gained_ns,
                reason=None,
                least_ns=tried.least_gained_ns,
                most_ns=tried.most_gained_ns,
            )
    return predicted
