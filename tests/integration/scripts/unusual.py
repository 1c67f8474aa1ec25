"""Trains in an unusual way, and prints every loss and a checksum of the parameters."""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import signal
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _common import DIM, Tower, batch, process_group, shard_mesh
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Training:
    """A sharded model, its optimizer, and the three parts of a step."""

    def __init__(
        self,
        prepare: Callable[[Any], None] = lambda model: None,
        *,
        whole: Any = None,
        wrap: Callable[..., Any] = fully_shard,
    ) -> None:
        self.model: Any = Tower(2) if whole is None else whole
        prepare(self.model)
        for layer in self.model.layers:
            wrap(layer, mesh=shard_mesh())
        wrap(self.model, mesh=shard_mesh())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss(self, tokens: torch.Tensor) -> Any:
        """Forward and its loss, printed."""
        loss = self.model(tokens).pow(2).mean()
        if dist.get_rank() == 0:
            print(loss.item().hex(), flush=True)
        return loss

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """All three in a row."""
        self.loss(batch()).backward()
        self.update()

    def checksum(self) -> float:
        """Of the whole parameters."""
        whole = [getattr(one, "full_tensor", one.clone)() for one in self.model.parameters()]
        sums = [one.detach().double().sum() for one in whole]
        return float(torch.stack(sums).sum())


def in_a_loop_of_asyncio(steps: int) -> Training:
    """Batches by a queue from another task; the backward in a thread."""

    async def train() -> Training:
        training, queue = Training(), asyncio.Queue[torch.Tensor](2)

        async def produce() -> None:
            for _ in range(steps):
                await queue.put(batch())

        producer = asyncio.create_task(produce())
        for _ in range(steps):
            loss = training.loss(await queue.get())
            await asyncio.to_thread(loss.backward)
            await asyncio.sleep(0)
            training.update()
        await producer
        return training

    return asyncio.run(train())


def in_threads(steps: int) -> Training:
    """Forward here, backward and the optimizer each in a thread of their own."""
    training = Training()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for _ in range(steps):
            first.submit(training.loss(batch()).backward).result()
            second.submit(training.update).result()
    return training


def in_a_thread(steps: int) -> Training:
    """The model too is made where the main thread never is."""

    def train() -> Training:
        training = Training()
        for _ in range(steps):
            training.step()
        return training

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(train).result()


def compiled(steps: int) -> Training:
    """Blocks are compiled in place before they are wrapped."""

    def compile_blocks(model: Any) -> None:
        for layer in model.layers:
            layer.compile(backend="aot_eager")

    training = Training(compile_blocks)
    for _ in range(steps):
        training.step()
    return training


def beside_ddp(steps: int) -> Training:
    """A second model under DDP, in the same step."""
    training = Training()
    other = DistributedDataParallel(nn.Linear(DIM, DIM))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(steps):
        beside = other(torch.randn(4, DIM)).pow(2).mean()
        (training.loss(batch()) + beside).backward()
        training.update()
        optimizer.step()
        optimizer.zero_grad()
        print(beside.item().hex(), flush=True)
    return training


def square(number: int) -> int:
    """What a worker does."""
    return number * number


def with_pools(steps: int) -> Training:
    """Processes and threads that live through all steps, and answer in each."""
    training = Training()
    with (
        multiprocessing.get_context("fork").Pool(2) as forked,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as spawned,
        ThreadPoolExecutor(2) as threads,
    ):
        for _ in range(steps):
            tokens = threads.submit(batch)
            print(forked.map(square, range(4)), spawned.submit(square, 5).result(), flush=True)
            training.loss(tokens.result()).backward()
            training.update()
    return training


def elsewhere(steps: int) -> Training:
    """In another working directory from the second step on."""
    training = Training()
    with tempfile.TemporaryDirectory() as folder:
        for step in range(steps):
            training.step()
            if step == 1:
                os.chdir(folder)
        print(sorted(entry.name for entry in Path().iterdir()), flush=True)
        os.chdir("/")
    return training


def saving(steps: int) -> Training:
    """A checkpoint is written beside the steps, one on its way when the next begins."""
    training = Training()
    save: Any = None
    with tempfile.TemporaryDirectory() as folder:
        for step in range(steps):
            training.step()
            if save is not None:
                save.result()
            state = get_model_state_dict(training.model)
            save = dcp.async_save(state, checkpoint_id=f"{folder}/{step}")
        if save is not None:
            save.result()
        print(sorted(entry.name for entry in Path(folder).iterdir()), flush=True)
    return training


def step_in_backward(steps: int) -> Training:
    """Each parameter has an optimizer of its own, which steps when its gradient is there."""
    training = Training()
    each = {one: torch.optim.SGD([one], lr=0.1) for one in training.model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        each[parameter].step()
        parameter.grad = None

    for one in each:
        one.register_post_accumulate_grad_hook(update)
    for _ in range(steps):
        training.loss(batch()).backward()
    return training


def saved_on_the_host(steps: int) -> Training:
    """Activations are packed by hooks of their own, gradients scaled and clipped."""
    training = Training()
    for step in range(steps):
        with torch.autograd.graph.save_on_cpu() if step % 2 else nullcontext():
            loss = training.loss(batch())
        (loss * 1024).backward()
        for one in training.model.parameters():
            one.grad /= 1024
        norm: Any = nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        print(float(norm.full_tensor()), flush=True)
        training.update()
    return training


class _Parts(Tower):
    """Never runs by its forward."""

    def encode(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def decode(self, x: torch.Tensor) -> Any:
        return self.head(x)


def by_methods(steps: int) -> Training:
    """Methods stand for the forward of the root."""
    training = Training(whole=_Parts(2))
    for name in ("encode", "decode"):
        register_fsdp_forward_method(training.model, name)
    for _ in range(steps):
        loss = training.model.decode(training.model.encode(batch())).pow(2).mean()
        print(loss.item().hex(), flush=True)
        loss.backward()
        training.update()
    return training


def replicated(steps: int) -> Training:
    """Every rank holds the whole model, by the FSDP2 that only replicates."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    training = Training(wrap=replicate)
    for _ in range(steps):
        training.step()
    return training


def dropped(steps: int) -> Training:
    """After every step the model is dropped, and has to be gone, and a new one is made."""
    for _ in range(steps):
        training = Training()
        training.step()
        model = weakref.ref(training.model)
        del training
        gc.collect()
        print("gone", model() is None, flush=True)
    return Training()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Counts the calls of torch's functions."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def under_modes(steps: int) -> Training:
    """Every operator and every call of a step is counted by modes of its own."""
    training = Training()
    for _ in range(steps):
        with _Operators() as operators, _Functions() as functions:  # type: ignore[no-untyped-call]
            training.step()
        print(operators.count, functions.count, flush=True)
    return training


def with_children(steps: int) -> Training:
    """In every step a child, for any of which is waited; each end of one is counted."""
    training, ended = Training(), Counter[str]()
    signal.signal(signal.SIGCHLD, lambda *_: ended.update(["told"]))
    for step in range(steps):
        child = os.fork()
        if not child:
            os._exit(step)
        waited, status = os.wait()
        print(waited == child, os.waitstatus_to_exitcode(status), flush=True)
        training.step()
    print(ended["told"], flush=True)
    return training


def _drawing(name: str) -> Any:
    def listed(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return getattr(super(_Listing, self), name)(*args, **kwargs)

    return listed


class _Listing(Tower):
    """Draws a random number whenever it is asked for what it holds."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("large", torch.zeros(1 << 18))

    parameters, named_parameters = _drawing("parameters"), _drawing("named_parameters")
    modules, named_modules = _drawing("modules"), _drawing("named_modules")
    buffers, named_buffers = _drawing("buffers"), _drawing("named_buffers")
    children, named_children = _drawing("children"), _drawing("named_children")
    state_dict, register_forward_pre_hook = _drawing("state_dict"), _drawing("register_forward_pre_hook")


def listing(steps: int) -> Training:
    """The model's own lists of what it holds change the numbers that are drawn next."""
    training = Training(whole=_Listing())
    for _ in range(steps):
        training.step()
    return training


class _Doubled(torch.Tensor):
    """A tensor without memory of its own, around one that has some."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)
        made.wrapped = wrapped
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls(func(*(one.wrapped if isinstance(one, cls) else one for one in args), **(kwargs or {})))


def tracing(steps: int) -> Training:
    """torch traces and transforms functions of its own in every step."""
    training = Training()
    for _ in range(steps):
        training.step()
        ones = torch.ones(2)
        traced = torch.jit.trace(lambda x: x + 1, ones)  # type: ignore[no-untyped-call]
        module: Any = torch.jit.trace(torch.nn.Sequential(torch.nn.Linear(2, 2)), ones)  # type: ignore[no-untyped-call]
        print(traced(ones).tolist(), len(str(traced.graph)), len(str(module.graph)), flush=True)
        made = make_fx(lambda x: x.sin() * 2)(ones)
        print(made(ones).tolist(), torch.fx.symbolic_trace(torch.nn.ReLU())(ones).tolist(), flush=True)
        print(torch.func.hessian(lambda x: (x**3).sum())(ones).tolist(), flush=True)
        print(torch.vmap(torch.sin)(torch.ones(2, 2)).tolist(), flush=True)
        print((_Doubled(ones) + 1).wrapped.tolist(), flush=True)
    return training


def _help(address: dict[str, str]) -> None:
    """A model of its own in a process of its own, under the same rank."""
    os.environ |= address
    with process_group():
        training = Training()
        for _ in range(3):
            training.step()


def with_a_helper(steps: int) -> Training:
    """A spawned process that has this rank in its environment trains too."""
    training = Training()
    for step in range(steps):
        training.step()
        if step == steps - 2:
            context = multiprocessing.get_context("spawn")
            helper = context.Process(target=_help, args=({"MASTER_PORT": "0"},))
            helper.start()
            helper.join()
            print("helper", helper.exitcode, flush=True)
    return training


def waiting(steps: int) -> Training:
    """At the end it waits for every child that it has: for its own alone."""
    training = Training()
    for _ in range(steps + 5):
        training.step()
    child = os.fork()
    if not child:
        os._exit(3)
    try:
        while True:
            pid, status = os.wait()
            print(pid == child, os.waitstatus_to_exitcode(status), flush=True)
    except ChildProcessError:
        print("no child is left", flush=True)
    return training


def as_usual(steps: int) -> Training:
    """Nothing unusual but the command line."""
    training = Training()
    for _ in range(steps):
        training.step()
    return training


WAYS = {
    one.__name__: one
    for one in (
        in_a_loop_of_asyncio,
        in_threads,
        in_a_thread,
        compiled,
        beside_ddp,
        with_pools,
        elsewhere,
        saving,
        step_in_backward,
        saved_on_the_host,
        by_methods,
        replicated,
        dropped,
        under_modes,
        with_children,
        listing,
        tracing,
        with_a_helper,
        waiting,
        as_usual,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="as_usual")
    parser.add_argument("--note", nargs="*", help="kept on the command line, for who reads it there")
    args = parser.parse_args()
    with process_group():
        total = WAYS[args.way](7).checksum()
        if dist.get_rank() == 0:
            print("checksum", total.hex(), flush=True)


if __name__ == "__main__":
    main()
