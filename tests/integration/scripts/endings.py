"""Trains and prints every loss and a checksum, then ends in the way it is told to."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import Tower, batch, process_group, shard_mesh
from torch.distributed.fsdp import fully_shard

SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL", "SIGABRT"}


HANDLED = {"handled", "handled_late", "handled_from_now_on", "chained", "where_default"}


def told(number: int, _: Any) -> None:
    """The training's own handler."""
    print("told", repr(number), flush=True)


def chain(before: Any) -> None:
    """Call the handler that was there after the training's own, as Lightning does."""

    def both(number: int, frame: Any) -> None:
        told(number, frame)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, both)


def close_pipes() -> None:
    """Close every pipe but the standard ones, as a daemon does; files of its own get no foreign bytes."""
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if int(link.name) > 2 and str(link.readlink()).startswith("pipe:"):
                os.close(int(link.name))
    files = [tempfile.TemporaryFile() for _ in range(8)]  # noqa: SIM115
    signal.signal(signal.SIGUSR1, lambda *_: None)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGUSR1)
    print("foreign bytes", [os.fstat(file.fileno()).st_size for file in files], flush=True)


def child() -> None:
    """What a worker process does."""


def backward() -> None:
    """A backward that is none of the model's."""
    (torch.ones(4, requires_grad=True) * 2).sum().backward()  # type: ignore[no-untyped-call]


def happen(how: str, folder: Path) -> None:
    """What happens in the middle of training."""
    if how in ("fork", "spawn", "forkserver"):
        context: Any = multiprocessing.get_context(how)
        worker = context.Process(target=child)
        worker.start()
        worker.join()
        print("worker", worker.exitcode, flush=True)
    elif how == "subprocess":
        said = subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True, check=True)
        print("subprocess", said.stdout.strip(), flush=True)
    elif how == "thread":
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    elif how == "no_folder":
        with tempfile.TemporaryDirectory() as name:
            os.chdir(name)
    elif how == "handler":
        signal.signal(signal.SIGUSR1, lambda *_: print("told", flush=True))
        os.kill(os.getpid(), signal.SIGUSR1)
    elif how in HANDLED:
        if how == "handled_from_now_on":
            signal.signal(signal.SIGTERM, told)
        elif how == "chained":
            chain(signal.getsignal(signal.SIGTERM))
        elif how == "where_default" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            print("before", repr(signal.signal(signal.SIGTERM, told)), signal.set_wakeup_fd(-1), flush=True)
        for seconds in (0.0, 0.3):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
        until = time.monotonic() + 7
        while (left := until - time.monotonic()) > 0:
            if how == "handled_late":
                ctypes.CDLL(None).usleep(int(left * 1e6))  # in C: no Python handler runs
            else:
                time.sleep(0.1)
    elif how == "handler_put_back":
        signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, told))
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "pipes_closed":
        close_pipes()
    elif how == "deleted":
        shutil.rmtree(folder)
    elif how == "read_only":
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    elif how == "interrupt":
        raise KeyboardInterrupt
    elif how == "raise":
        raise ValueError("no such token")
    elif (how == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0") or how == "exit":
        sys.exit(3)
    elif how == "os_exit":
        os._exit(4)
    elif how == "os_exit_well":
        os._exit(0)
    elif how == "abort":
        os.abort()
    elif how == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
    elif how in SIGNALS:
        os.kill(os.getpid(), getattr(signal, how))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", default="none")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path("none"), help="of the recording")
    args = parser.parse_args()
    if args.how in {"handled", "handled_late"}:
        signal.signal(signal.SIGTERM, told)
    with process_group():
        model: Any = Tower(1)
        for layer in model.layers:
            fully_shard(layer, mesh=shard_mesh())
        fully_shard(model, mesh=shard_mesh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(args.steps):
            loss = model(batch()).pow(2).mean()
            if dist.get_rank() == 0:
                print(step, loss.item().hex(), flush=True)
            everywhere = args.how.startswith("all_")
            if step == 3 and (everywhere or dist.get_rank() == dist.get_world_size() - 1):
                happen(args.how.removeprefix("all_"), args.folder)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        sums = [parameter.full_tensor().detach().double().sum() for parameter in model.parameters()]
        total = float(torch.stack(sums).sum())
        if dist.get_rank() == 0:
            print("checksum", total.hex(), flush=True)


if __name__ == "__main__":
    main()
