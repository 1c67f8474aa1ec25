"""What runs in a process of a parity check: the plain training, or one rank of the sharded one.

Both build the model from the same seed and feed it the batches that ``batch(index, rank, world_size)`` gives.
The plain one takes the mean over all ranks and micro-batches and keeps what every step made in files; the
ranks measure their own tensors, gathered whole, against them.

What ``check parity`` shards where no ``--shard`` says it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fsdp2prof.errors import ModelError
from fsdp2prof.tables.probes import Measured
from fsdp2prof.workflows.probes.env_probe import expert_mesh_of, mesh_of


def shard_by_default(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every member of an outermost list of modules, then the root, over the data-parallel dimensions."""
    names = [name for name in mesh.mesh_dim_names or () if name in ("dp_replicate", "dp_shard")]
    data = mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]
    for member in members_of_lists(module):
        if not isinstance(member, FSDPModule):  # one that is in two lists
            fully_shard(member, mesh=data)
    fully_shard(module, mesh=data)


def members_of_lists(module: nn.Module, of_a_list: bool = False) -> Iterator[nn.Module]:
    """Members of lists of modules that have parameters; lists inside a member are its own affair.

    A list or dictionary in a list is never called, so its members stand for it.
    """
    for child in list(module.children()):
        never_called = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if of_a_list and not never_called:
            if any(True for _ in child.parameters()):
                yield child
        else:
            is_list = isinstance(child, (nn.ModuleList, nn.Sequential))
            yield from members_of_lists(child, is_list or (of_a_list and never_called))


_LEARNING_RATE, _MOMENTUM = 0.05, 0.9
_LOWER = ("float64", "float32", "float16", "bfloat16")
"""Dtypes from high to low precision; unknown ones are lower still."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParitySettings:
    """Settings of the parity trainings."""

    model: str
    batch: str
    shard: str | None
    mesh: Mapping[str, int]
    """Dimension -> size, slowest first; ``ep`` regroups ranks of the others."""
    steps: int
    micro_batches: int
    seed: int
    device: str
    timeout_s: float
    folder: str
    """Where the plain training leaves its tensors."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return prod(size for name, size in self.mesh.items() if name != "ep")

    @property
    def data_ranks(self) -> int:
        """Number of ranks with separate data: tensor-parallel ranks share theirs."""
        return self.world_size // self.mesh.get("tp", 1)


class _Training:
    """Model, loss, optimizer and data of one side."""

    def __init__(self, settings: ParitySettings) -> None:
        sys.path.insert(0, str(Path.cwd()))
        torch.set_num_threads(1)
        self.settings = settings
        self._batch = _load(settings.batch)
        factory = _load(settings.model)
        torch.manual_seed(settings.seed)
        with torch.device(settings.device):
            made = factory()
        parts = made if isinstance(made, tuple) else (made,)
        if not isinstance(parts[0], nn.Module):
            raise ModelError(f"model {settings.model}: returned {type(made).__name__}, not a module")
        self.module: nn.Module = parts[0]
        self._loss: Callable[[nn.Module, Any], Tensor] = (
            parts[1] if len(parts) > 1 and parts[1] else _mean_square
        )
        self.digests: dict[tuple[int, int], str] = {}

    def start(self) -> None:
        """Make the optimizer; the module is sharded by now."""
        trained = [one for one in self.module.parameters() if one.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=_LEARNING_RATE, momentum=_MOMENTUM)

    def loss(self, index: int, data_rank: int) -> Tensor:
        """Loss of one micro-batch of one rank, from the same random state on both sides."""
        torch.manual_seed(self.settings.seed + 1 + index * self.settings.data_ranks + data_rank)
        with torch.device(self.settings.device):
            batch = self._batch(index, data_rank, self.settings.data_ranks)
        self.digests[index, data_rank] = _digest(batch)
        torch.manual_seed(self.settings.seed + 1 + index * self.settings.data_ranks + data_rank)
        return self._loss(self.module, batch)

    def update(self) -> None:
        """Step and forget the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        """Parameters by name, as they are held."""
        return {name: one.detach() for name, one in self.module.named_parameters()}

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients by name; None for a parameter without one."""
        return {name: one.grad for name, one in self.module.named_parameters()}


def run_plain(settings: ParitySettings) -> list[float]:
    """Train in one process; return the mean loss of each step."""
    training, count = _Training(settings), settings.micro_batches * settings.data_ranks
    training.start()
    folder = Path(settings.folder)
    _save(folder / "start.pt", parameters=training.parameters())
    means = []
    for step in range(settings.steps):
        losses: dict[str, Tensor] = {}
        for micro in range(settings.micro_batches):
            index = step * settings.micro_batches + micro
            for rank in range(settings.data_ranks):
                loss = training.loss(index, rank)
                (loss / count).backward()  # type: ignore[no-untyped-call]
                losses[f"{micro}.{rank}"] = loss.detach()
        gradients = {name: one.clone() for name, one in training.gradients().items() if one is not None}
        training.update()
        means.append(float(sum(losses.values())) / count)
        digests = {f"{index}.{rank}": digest for (index, rank), digest in training.digests.items()}
        _save(
            folder / f"step{step}.pt",
            losses=losses,
            gradients=gradients,
            parameters=training.parameters(),
            digests=digests,
        )
        training.digests.clear()
    return means


def run_rank(settings: ParitySettings, rank: int) -> tuple[list[Measured], list[float]]:
    """Train as one rank; return its measurements, and its own mean loss of each step."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(settings.world_size)})
    if settings.device == "cuda":
        torch.cuda.set_device(rank)
    folder = Path(settings.folder)
    store = dist.FileStore(str(folder / "store"), settings.world_size)
    dist.init_process_group(
        "nccl" if settings.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=settings.world_size,
        timeout=timedelta(seconds=settings.timeout_s),
    )
    try:
        return _train_sharded(settings, rank, folder)
    finally:
        dist.destroy_process_group()


def _train_sharded(settings: ParitySettings, rank: int, folder: Path) -> tuple[list[Measured], list[float]]:
    mesh, experts = (make(settings.device, settings.mesh) for make in (mesh_of, expert_mesh_of))
    assert mesh is not None
    training = _Training(settings)
    if settings.shard is None:
        shard_by_default(training.module, mesh)
    elif experts is None:
        _load(settings.shard)(training.module, mesh)
    else:
        _load(settings.shard)(training.module, mesh, experts)
    part = _Part() if experts is None else _Part(experts["ep"].size(), experts["ep"].get_local_rank())
    training.start()
    data_rank = rank // settings.mesh.get("tp", 1)
    precision = _precision(training.module)
    start = _read(folder / "start.pt")["parameters"]
    measured = list(_compare(-1, "parameter", start, training.parameters(), precision, part))
    means = []
    for step in range(settings.steps):
        losses = {}
        for micro in range(settings.micro_batches):
            if settings.micro_batches > 1 and isinstance(training.module, FSDPModule):
                training.module.set_requires_gradient_sync(micro == settings.micro_batches - 1)
            loss = training.loss(step * settings.micro_batches + micro, data_rank)
            (loss / settings.micro_batches).backward()  # type: ignore[no-untyped-call]
            losses[f"{micro}.{data_rank}"] = loss.detach()
        plain = _read(folder / f"step{step}.pt")
        digests = {f"{index}.{one}": digest for (index, one), digest in training.digests.items()}
        measured += _compare_batches(step, plain["digests"], digests)
        measured += _compare_losses(step, plain["losses"], losses, precision)
        gradients, held = training.gradients(), training.parameters()
        measured += _compare(step, "gradient", plain["gradients"], gradients, precision, part)
        training.update()
        measured += _compare(step, "parameter", plain["parameters"], held, precision, part)
        means.append(float(sum(losses.values())) / settings.micro_batches)
        training.digests.clear()
    return measured, means


def _precision(module: nn.Module) -> dict[str, str]:
    """Parameter -> the lowest precision on its way: its own, gathered, reduced."""
    lowest = {name: _name(one.dtype) for name, one in module.named_parameters()}
    for prefix, part in module.named_modules():
        if not isinstance(part, FSDPModule):
            continue
        policy = part._get_fsdp_state()._mp_policy
        for dtype in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype):
            if dtype is None:
                continue
            for name in lowest:
                if name.startswith(prefix):
                    lowest[name] = max(lowest[name], _name(dtype), key=_rank_of_dtype)
    worst = max(lowest.values(), key=_rank_of_dtype, default="float32")
    return dict.fromkeys(lowest, worst)  # what comes out of one layer goes into the others


def _rank_of_dtype(name: str) -> int:
    return _LOWER.index(name) if name in _LOWER else len(_LOWER)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Part:
    """Which of the experts a rank holds: one of ``ranks`` equal parts of dimension 0."""

    ranks: int = 1
    rank: int = 0

    def of(self, plain: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a tensor if ``like``, gathered whole, is not larger; otherwise the whole
        tensor."""
        rows = plain.shape[0] // self.ranks if plain.dim() else 0
        if self.ranks == 1 or like.shape != (rows, *plain.shape[1:]):
            return plain
        return plain[self.rank * rows : (self.rank + 1) * rows]


def _compare(
    step: int,
    kind: str,
    plain: Mapping[str, Tensor],
    sharded: Mapping[str, Tensor | None],
    precision: Mapping[str, str],
    part: _Part,
) -> Iterator[Measured]:
    """Compare tensors that both sides have, as whole tensors; every rank must call it, because gathering
    is a collective.

    Of experts distributed by expert parallelism, compare the part of the rank's group.
    """
    names = list(dict.fromkeys([*sharded, *plain]))
    for position, name in enumerate(names):
        mine, its = sharded.get(name), plain.get(name)
        if mine is None and its is None:
            continue
        whole = None if mine is None else mine.full_tensor() if isinstance(mine, DTensor) else mine
        if its is not None and whole is not None:
            its = part.of(its, whole)
        yield _measure(step, kind, name, position, precision.get(name, "float32"), its, whole)


def _measure(
    step: int, kind: str, name: str, position: int, dtype: str, plain: Tensor | None, sharded: Tensor | None
) -> Measured:
    if plain is None or sharded is None or plain.shape != sharded.shape:
        norm = 0.0 if plain is None else float(plain.double().norm())
        return Measured(
            step=step,
            kind=kind,
            name=name,
            position=position,
            dtype=dtype,
            error=norm,
            norm=norm,
            product=0.0,
            missing=True,
        )
    expected, found = plain.double().flatten(), sharded.detach().to(plain.device).double().flatten()
    return Measured(
        step=step,
        kind=kind,
        name=name,
        position=position,
        dtype=dtype,
        error=float((found - expected).norm()),
        norm=float(expected.norm()),
        product=float(found @ expected),
    )


def _compare_batches(step: int, plain: Mapping[str, str], mine: Mapping[str, str]) -> Iterator[Measured]:
    for position, (name, digest) in enumerate(mine.items()):
        same = plain.get(name) == digest
        yield Measured(
            step=step,
            kind="batch",
            name=f"of rank {name.partition('.')[2]}",
            position=position,
            dtype="int64",
            error=0.0 if same else float("inf"),
            norm=1.0,
            product=1.0,
        )


def _compare_losses(
    step: int, plain: Mapping[str, Tensor], mine: Mapping[str, Tensor], precision: Mapping[str, str]
) -> Iterator[Measured]:
    dtype = next(iter(precision.values()), "float32")
    for position, (name, loss) in enumerate(mine.items()):
        yield _measure(
            step, "loss", f"of rank {name.partition('.')[2]}", position, dtype, plain[name], _whole(loss)
        )


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mean_square(module: nn.Module, batch: Any) -> Tensor:
    """Return the loss that is trained where the factory gives none."""
    if isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, tuple) else module(batch)
    if not isinstance(output, Tensor):
        output = getattr(output, "loss", None)
    if not isinstance(output, Tensor):
        raise ModelError("the model gives no tensor: let the factory return (module, loss)")
    return output if output.dim() == 0 else output.float().pow(2).mean()


def _digest(batch: Any) -> str:
    """Hash of the tensors of a batch, in whatever containers."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in _tensors(batch):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _load(source: str) -> Callable[..., Any]:
    """``package.module:function`` of the user's. Raises ``ModelError``."""
    module, _, attribute = source.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise ModelError(f"{source}: cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ModelError(f"{source}: not a function")
    return found  # type: ignore[no-any-return]


def _save(path: Path, **parts: Any) -> None:
    torch.save(parts, path)


def _read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return loaded
