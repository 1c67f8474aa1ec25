"""Commands under ``fsdp2prof record`` whose launcher is broken: each must end and print as it does alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["BOUNDARY", "COMMANDS", "entered", "launched"]

BOUNDARY = (
    "fsdp2prof.commands.recording_options:ended",
    "fsdp2prof.recorder.launch.host_processes:HangReport._watch",
    "fsdp2prof.recorder.launch.launcher:",
    *(
        f"fsdp2prof.recorder.launch.recording:NodeRecording.{name}"
        for name in ("__init__", "prepare", "look", "request", "finish", "_try", "_fail")
    ),
)
"""What stands between the command and everything that may fail."""

COMMANDS = {"everything": ["--summary", "--hang-after", "60", "--signal", "USR1"], "orphan": []}
"""Options of ``record`` by what the command does."""

_RANK = """
import json, os, signal, sys, time
from pathlib import Path

def leave(pid):
    manifest = {"schema": "fsdp2prof.manifest/1", "state": "running", "rank": 0, "pid": pid,
                "world_size": 1, "host": os.uname().nodename}
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    Path(os.environ["FSDP2PROF_ALIVE"], str(pid)).touch()

print("rank", os.environ["RANK"], flush=True)
if "FSDP2PROF_RECORD" in os.environ:
    run = Path(json.loads(os.environ["FSDP2PROF_RECORD"])["run"])
    folder = run / "rank-00000"
    if sys.argv[1] == "everything":
        leave(os.getpid())
        (folder / "stacks.txt").write_bytes(b"# no step ended")
        (run / ".summaries-00000" / "rank-00000").touch()
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(2.5)
    elif orphan := os.fork():
        leave(orphan)
        time.sleep(0.7)
    else:
        time.sleep(60)
        os._exit(0)
print("ends", flush=True)
os._exit(5)
"""
_LAUNCHER = """
import json, sys, threading
function, call, file = json.loads(sys.argv.pop(1))
counts, begun = {}, False

def profile(frame, event, _):
    global begun
    if event != "call":
        return
    module = frame.f_globals.get("__name__") or ""
    if not module.startswith("fsdp2prof."):
        return
    name = f"{module}:{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
    begun = begun or name == "fsdp2prof.recorder.launch.launcher:launch"
    if begun:
        counts[name] = counts.get(name, 0) + 1
        if name == function and counts[name] == call:
            raise RuntimeError(name)

threading.setprofile(profile)
sys.setprofile(profile)
from fsdp2prof.cli import main
from fsdp2prof.recorder.launch import host_processes
host_processes._LET_FINISH_S = 0.2
try:
    main()
finally:
    sys.setprofile(None)
    threading.setprofile(None)
    if file:
        open(file, "w").write(json.dumps(counts))
"""


def launched(
    folder: Path, what: str, function: str = "", call: int = 0, *, counts: Path | None = None
) -> tuple[int, str, str]:
    """Record a command; return its exit code, stdout and stderr."""
    script = folder / "rank.py"
    script.write_text(_RANK)
    run = folder / f"run-{len(list(folder.iterdir()))}"
    injection = json.dumps([function, call, "" if counts is None else str(counts)])
    done = subprocess.run(
        [sys.executable, "-c", _LAUNCHER, injection, "record", "-o", str(run), *COMMANDS[what],
         "--", sys.executable, str(script), what],
        env=os.environ | {"RANK": "0"}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def entered(folder: Path, what: str) -> list[tuple[str, int]]:
    """Return the launcher's functions with their numbers of calls, without :data:`BOUNDARY`."""
    counts = folder / "counts.json"
    launched(folder, what, counts=counts)
    found = json.loads(counts.read_text())
    return sorted(
        (name, n)
        for name, n in found.items()
        if not name.startswith(BOUNDARY) and not name.endswith((":<module>", "comp>", "<genexpr>"))
    )
