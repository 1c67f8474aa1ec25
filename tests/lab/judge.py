"""Run a case with default options and hold what was said against what is true."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp2prof.cli import cli
from fsdp2prof.run_directory import RUN_FILE
from lab.case import Case, Training

__all__ = ["Judgement", "Said", "document", "judge", "make", "said"]

TRAINER = Path(__file__).with_name("trainer.py")
PROGRAMS = Path(__file__).with_name("programs.py")
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """A cause with a remedy, as the analysis orders them."""

    id: str
    change: str
    message: str
    gain_ns: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What an analysis said of a case, and whether it is right."""

    case: str
    fault: str
    size: str
    first: str
    """Id of the first cause; empty: nothing is to be changed."""
    cause_right: bool
    remedy_right: bool
    promised_ns: float | None = None
    measured_ns: float | None = None
    beside: list[str] = field(default_factory=list)
    """Ids that were said besides."""
    false: list[str] = field(default_factory=list)
    """Those of all ids that are not true of the case."""
    verdict: str = ""
    """The first line of the verdict."""
    change: str = ""

    @property
    def right(self) -> bool:
        """Whether the first cause and its remedy are right and nothing false was said."""
        return self.cause_right and self.remedy_right and not self.false


def judge(case: Case, folder: Path, *, mended: bool = False) -> Judgement:
    """Run the case in ``folder`` (an existing run is reused) and judge; ``mended`` measures the gain."""
    analysed = document(make(case, folder / "planted"))
    causes = said(analysed)
    first = causes[0] if causes else None
    if case.size == "much":
        cause = first is not None and first.id in case.causes
        named = f"{first.message} {first.change}" if first else ""
        cause = cause and re.search(case.place, named, re.IGNORECASE) is not None
        remedy = cause and first is not None and re.search(case.remedy, first.change, re.I) is not None
        true = case.causes | case.excused
    else:
        cause = remedy = first is None or first.id in case.excused
        true = case.excused
    measured = None
    if mended and case.size == "much":
        after = document(make(case, folder / "mended", mended=True))
        measured = step_ns(analysed) - step_ns(after)
    return Judgement(
        case=case.name,
        fault=case.fault,
        size=case.size,
        first=first.id if first else "",
        cause_right=cause,
        remedy_right=remedy,
        promised_ns=first.gain_ns if first else None,
        measured_ns=measured,
        beside=[one.id for one in causes[1:]],
        false=[one.id for one in causes if one.id not in true],
        verdict=(analysed.get("verdict") or [""])[0],
        change=first.change if first else "",
    )


def said(analysed: Mapping[str, Any]) -> list[Said]:
    """Return every cause with a remedy in its order.

    First comes the finding that the verdict begins with, then the ledger's, then others about the set-up.
    """
    ledger = (analysed.get("trace") or {}).get("ledger")
    findings = list(_findings(analysed))
    first = [one for one in findings if one.message in analysed["verdict"][:1]]
    causes = [*first, *(_causes(ledger) if ledger else ()), *_savings(analysed)]
    named = {one.id for one in causes}
    return [*causes, *(one for one in findings if one.id not in named)]


def _causes(ledger: Mapping[str, Any]) -> Iterator[Said]:
    for one in ledger["entries"]:
        remedy = one["remedy"]
        if one["told"] and remedy:
            place = " ".join(str(one[key]) for key in ("title", "said", "fqn") if one[key])
            rank = "" if one["rank"] is None else f" rank {one['rank']}"
            yield Said(
                id=one["id"], change=remedy["change"], message=f"{place}{rank}", gain_ns=remedy["gain_ns"]
            )


def _savings(analysed: Mapping[str, Any]) -> Iterator[Said]:
    """What would lower the peak, where the verdict says so."""
    if any(line.startswith("Largest savings") for line in analysed["verdict"]):
        for one in analysed["memory"]["ranks"][0]["remedies"]:
            yield Said(id=one["action"], change=one["how"], message=f"{one['saves_bytes']} B")


def _findings(analysed: Mapping[str, Any]) -> Iterator[Said]:
    for one in analysed["findings"]:
        if one["change"] and one["severity"] != "info":
            cost = one["evidence"].get("cost_ns_per_step")
            yield Said(id=one["id"], change=one["change"], message=one["message"], gain_ns=cost)


def document(run: Path) -> dict[str, Any]:
    """Analyse a run, or a folder of traces alone, with default options; the JSON stays beside it."""
    output = run.with_name(f"{run.name}.json")
    output.unlink(missing_ok=True)
    recorded = (run / RUN_FILE).exists()
    verb = "run" if recorded else "trace"
    cli.main(["analyze", verb, "-q", "-o", str(output), str(run)], standalone_mode=False)
    found = json.loads(output.read_bytes())
    return found if recorded else {"trace": found, **{key: found[key] for key in ("verdict", "findings")}}


def step_ns(analysed: Mapping[str, Any]) -> float:
    """Length of a step: of the unrecorded ones where they are known."""
    trace = analysed["trace"]
    unrecorded = trace["unrecorded_step"]
    return float(unrecorded["median_ns"] if unrecorded else trace["totals"]["step_ns"])


def make(case: Case, run: Path, *, mended: bool = False) -> Path:
    """Make the run, unless it is there already."""
    if run.exists():
        return run
    if case.training is not None:
        switches = case.training.mended if mended else case.training.switches
        _train(case.training, switches or {}, run)
    else:
        writer = case.write_mended if mended else case.write
        assert writer is not None, case.name
        writer(run)
    return run


def _train(training: Training, switches: Mapping[str, object], run: Path) -> None:
    launcher = [sys.executable]
    if switches.get("group") != "fake":
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(training.ranks)]
    script = [str(TRAINER), *(f"{name}={value}" for name, value in switches.items())]
    if training.program:
        script = [str(PROGRAMS), training.program]
    record = [sys.executable, "-m", "fsdp2prof", "record", "-q", "-o", str(run), "--"]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [*record, *launcher, *script],
        env={**os.environ, "PYTHONPATH": path},  # the package may not be installed
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ended.returncode:
        shutil.rmtree(run, ignore_errors=True)
        raise RuntimeError(f"{' '.join(script)}: exit code {ended.returncode}\n{ended.stderr[-2000:]}")
