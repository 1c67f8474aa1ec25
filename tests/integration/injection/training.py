"""A recorded training of one rank, again and again in forked children, each with one thing of ours broken.

Reads a list of injections from stdin, JSON; writes a JSON line for each of them to stdout. The parent imports
torch once and nothing of the recorder, so that a child takes a second.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import isal.igzip  # noqa: F401
import msgspec  # noqa: F401
import numpy  # noqa: F401
import torch
import torch._dynamo  # what torch imports late is imported once
import torch.distributed as dist
import torch.profiler
import torch.testing._internal
from torch import nn
from torch.distributed import tensor as _tensor  # noqa: F401

import fsdp2prof

BOOTSTRAP = Path(fsdp2prof.__file__).parent / "recorder" / "bootstrap"
BOUNDARY = ("fsdp2prof.recorder.guard:", "fsdp2prof.storage_tracker:PlainOperators.__torch_dispatch__")
"""What stands between the training and everything that may fail, with ``sitecustomize``."""
STEPS = 9
TRIAL_STEPS = 28
"""For a trial of two candidates: settling, a round, a recording of each."""


class Injected(Exception):
    """What a broken function raises."""


class Calls:
    """Counts the calls of the package's functions by name; the ``call``-th of ``function`` raises."""

    def __init__(self, function: str | None = None, call: int = 0) -> None:
        self.counts: dict[str, int] = {}
        self._function, self._call = function, call

    def watch(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        module = frame.f_globals.get("__name__") or ""
        if not module.startswith("fsdp2prof."):
            return
        name = f"{module}:{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"
        count = self.counts[name] = self.counts.get(name, 0) + 1
        if name == self._function and count == self._call:
            raise Injected(name)


class BrokenImports:
    """Finds one module of the package, and raises instead."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == self._name:
            raise Injected(fullname)


def break_torch(path: str, how: str) -> None:
    """Delete a name of torch, change its signature, or hide it from the recorder."""
    module, _, name = path.partition(":")
    if how == "hide":
        module = f"torch.distributed.fsdp._fully_shard.{module}"
    owner: Any = import_module(module)
    *owners, last = name.split(".")
    for one in owners:
        owner = getattr(owner, one, None)
    if owner is None:
        return  # another torch, without this class
    if how == "delete":
        delattr(owner, last)
    elif how == "change":
        setattr(owner, last, lambda: None)
    else:
        hide(owner, last)


def hide(kind: type[Any], name: str) -> None:
    """Let an attribute of a class's objects be there for everybody but the recorder."""
    there = object()
    default = kind.__dict__.get(name, there)

    def get(item: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("fsdp2prof."):
            raise AttributeError(name)
        if name in item.__dict__ or default is there:
            return item.__dict__[name]
        return default.__get__(item, kind) if hasattr(default, "__get__") else default

    def put(item: Any, value: Any) -> None:
        item.__dict__[name] = value

    def remove(item: Any) -> None:
        item.__dict__.pop(name)

    setattr(kind, name, property(get, put, remove))


def train(steps: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item().hex())
    with torch.no_grad():
        print("evaluated", model(torch.ones(1, 8)).sum().item().hex())
    dist.destroy_process_group()


def begin_recording(injection: dict[str, Any], run: Path) -> None:
    """Do what the interpreter does where ``fsdp2prof record`` started it."""
    run.mkdir(parents=True, exist_ok=True)
    os.environ["FSDP2PROF_RECORD"] = json.dumps({"run": str(run), "options": injection["options"]})
    os.environ["FSDP2PROF_ALIVE"] = str(run)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if "module" in injection:
        sys.meta_path.insert(0, BrokenImports(injection["module"]))
    # Imported anew, so that the recorder sees it; what torch imported late is there already.
    for name in ("", "._fully_shard", "._fully_shard._fully_shard"):
        sys.modules.pop(f"torch.distributed.fsdp{name}", None)
    sys.modules.pop("sitecustomize", None)
    sys.path.insert(0, str(BOOTSTRAP))
    import_module("sitecustomize")

    if "torch" in injection:
        from torch.distributed import fsdp  # noqa: F401

        break_torch(injection["torch"], injection["how"])


def child(injection: dict[str, Any]) -> None:
    folder = Path(injection["folder"])
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    os.close(0)
    calls = Calls(injection.get("function"), injection.get("call", 0))
    if injection.get("recorded", True):
        begin_recording(injection, folder / "run")
        if "count" in injection:
            import atexit

            atexit.register(lambda: (folder / "calls.json").write_text(json.dumps(calls.counts)))
        calls.watch()
    train(injection.get("steps", STEPS))


def main() -> None:
    gc.freeze()
    torch.set_num_threads(1)
    for number, injection in enumerate(json.load(sys.stdin)):
        Path(injection["folder"]).mkdir(parents=True)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            child(injection)
            return  # and end as a script does: atexit, destructors, the exit code
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"number": number, "code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
