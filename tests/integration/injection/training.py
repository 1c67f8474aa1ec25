"""A recorded training, again and again in forked children, each with one thing of ours broken.

Reads a list of injections from stdin, JSON; writes a JSON line for each of them to stdout. The parent imports
torch once and nothing of the recorder, so that a child takes a second.
"""

from __future__ import annotations

import _thread
import ast
import gc
import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
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
BOUNDARY = (
    "fsdp2prof.recorder.guard:",
    *(f"fsdp2prof.recorder.api:Recorder.{name}" for name in ("__init__", "__enter__", "step", "__exit__")),
    "fsdp2prof.recorder.api:_unless_refused",
    "fsdp2prof.storage_tracker:PlainOperators.__torch_dispatch__",
    "fsdp2prof.storage_tracker:_with_tensors",
    "fsdp2prof.storage_tracker:_positions_of_tensors",
)
"""What stands between the training and everything that may fail, with ``sitecustomize``."""
STEPS = 9
TRIAL_STEPS = 28
"""For a trial of two candidates: settling, a round, a recording of each."""
ENDINGS = ("returns", "raises", "SIGTERM", "no memory")
SLOW_S = 2.0
PATIENCE_S = 150.0
"""Seconds until a training counts as hanging."""


class Injected(Exception):
    """What a broken function raises."""


class InjectedBase(BaseException):
    """What few handlers of exceptions catch."""


class Calls:
    """Counts the calls of the package's functions by name, and breaks the ``call``-th of ``function``."""

    def __init__(self, injection: dict[str, Any], rank: int) -> None:
        self.counts: dict[str, int] = {}
        here = injection.get("only_rank", rank) == rank
        self._how = injection.get("how", "raise")
        self._function = injection.get("function") if here and self._how != "none" else None
        self._call = injection.get("call", 0)

    def watch(self) -> None:
        start: Any = _thread.start_new_thread

        def start_watched(function: Any, arguments: Any) -> int:
            def watched(*given: Any) -> None:
                sys.setprofile(self)
                function(*given)

            return int(start(watched, arguments))

        _thread.start_new_thread = start_watched  # type: ignore[assignment]
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
        if name != self._function or count != self._call:
            return
        if self._how == "sleep":
            time.sleep(SLOW_S)
        else:
            raise (InjectedBase if self._how == "base" else Injected)(name)


class ReturnsNone(SourceFileLoader):
    """Loads the package's modules such that one function returns None instead of its value."""

    function = ""

    @classmethod
    def find_spec(cls, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != cls.function.partition(":")[0]:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = cls(fullname, spec.origin)
        return spec

    def get_code(self, fullname: str) -> Any:
        tree = ast.parse(Path(self.path).read_bytes())
        self._break(tree, [])
        return compile(tree, self.path, "exec")

    def _break(self, tree: ast.AST, names: list[str]) -> None:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.FunctionDef):
                if ".".join([*names, node.name]) == self.function.partition(":")[2]:
                    _return_nothing(node)
                self._break(node, [*names, node.name, "<locals>"])
            else:
                self._break(node, [*names, node.name] if isinstance(node, ast.ClassDef) else names)


def _return_nothing(tree: ast.AST) -> None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Return) and node.value is not None:
            both = ast.Tuple([node.value, ast.Constant(None)], ast.Load())
            last = ast.Subscript(both, ast.Constant(1), ast.Load())
            node.value = ast.fix_missing_locations(ast.copy_location(last, node))
        elif not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            _return_nothing(node)


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


def train(injection: dict[str, Any], rank: int, *, after_fork: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    ranks = injection.get("ranks", 1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    store = dist.HashStore() if ranks == 1 else met(Path(injection["folder"], "port"), rank, ranks)
    device = "cuda" if torch.cuda.is_available() and ranks == 1 else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=ranks)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with recorder_of(injection) as recorder:
        train_steps(injection, model, optimizer, recorder, after_fork)
    with torch.no_grad():
        print("evaluated", model(torch.ones(1, 8, device=device)).sum().item().hex())
    dist.destroy_process_group()


def recorder_of(injection: dict[str, Any]) -> Any:
    """The recorder that the script starts itself; where nothing records, what does nothing."""
    if not injection.get("api"):
        return nullcontext()
    from fsdp2prof import Recorder

    return Recorder(Path(injection["folder"], "run"), **injection["options"])


def train_steps(
    injection: dict[str, Any], model: nn.Module, optimizer: Any, recorder: Any, after_fork: Any
) -> None:
    steps, ending = injection.get("steps", STEPS), injection.get("ending", "returns")
    device = next(model.parameters()).device
    for step in range(steps):
        if step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            if injection.get("options", {}).get("on_demand"):  # as `fsdp2prof trigger` does
                Path(injection["folder"], "run", "trigger.json").write_text('{"reason": "asked"}')
        if step == 3:
            worker = os.fork()
            if not worker:
                after_fork()
                os._exit(7)
            print("worker", os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
        if step == steps - 1 and ending == "raises":
            raise ValueError("the training's own")
        if step == steps - 1 and ending == "no memory":
            torch.empty(1 << 50, device=device)
        if step == steps - 1 and ending == "SIGTERM":
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGTERM)
        loss = model(torch.randn(4, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step()
        print(step, loss.item().hex())


def met(file: Path, rank: int, ranks: int) -> Any:
    """The store of several ranks, at the port that the first leaves in ``file``."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not rank:
        store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(file.read_text()), ranks, is_master=False)


def begin_recording(injection: dict[str, Any], run: Path, rank: int) -> None:
    """Do what the interpreter does where ``fsdp2prof record`` started it."""
    run.mkdir(parents=True, exist_ok=True)
    os.environ["FSDP2PROF_RECORD"] = json.dumps({"run": str(run), "options": injection["options"]})
    os.environ["FSDP2PROF_ALIVE"] = str(run)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ["WORLD_SIZE"] = str(injection.get("ranks", 1))
    here = injection.get("only_rank", rank) == rank
    if here and "module" in injection:
        sys.meta_path.insert(0, BrokenImports(injection["module"]))
    if here and injection.get("how") == "none" and "function" in injection:
        ReturnsNone.function = injection["function"]
        sys.meta_path.insert(0, ReturnsNone)
    # Imported anew, so that the recorder sees it; what torch imported late is there already.
    for name in ("", "._fully_shard", "._fully_shard._fully_shard"):
        sys.modules.pop(f"torch.distributed.fsdp{name}", None)
    sys.modules.pop("sitecustomize", None)
    sys.path.insert(0, str(BOOTSTRAP))
    import_module("sitecustomize")

    if "torch" in injection:
        from torch.distributed import fsdp  # noqa: F401

        break_torch(injection["torch"], injection["how"])


def child(injection: dict[str, Any], rank: int) -> None:
    folder = Path(injection["folder"])
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with (folder / f"{name}{rank or ''}").open("w") as file:
            os.dup2(file.fileno(), descriptor)
    os.close(0)
    calls = Calls(injection, rank)
    kill = os.kill

    def count(*given: Any) -> None:
        (folder / f"calls-{os.getpid()}.json").write_text(json.dumps(calls.counts))
        if given:
            kill(*given)

    if injection.get("recorded", True):
        if injection.get("api"):
            import_module("fsdp2prof.recorder.api")
        else:
            begin_recording(injection, folder / "run", rank)
        if "count" in injection:
            import atexit

            atexit.register(count)
            os.kill = count
        calls.watch()
    train(injection, rank, after_fork=count if "count" in injection else lambda: None)


def ended(pids: list[int]) -> list[int]:
    """Exit codes of all, those that hang with SIGKILL."""
    until = time.monotonic() + PATIENCE_S
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def main() -> None:
    gc.freeze()
    torch.set_num_threads(1)
    for number, injection in enumerate(json.load(sys.stdin)):
        Path(injection["folder"]).mkdir(parents=True)
        sys.stdout.flush()
        pids = []
        for rank in range(injection.get("ranks", 1)):
            pid = os.fork()
            if pid == 0:
                child(injection, rank)
                return  # and end as a script does: atexit, destructors, the exit code
            pids.append(pid)
        print(json.dumps({"number": number, "codes": ended(pids)}), flush=True)


if __name__ == "__main__":
    main()
