"""The commands that a rank issues to its device in a step, in host order: the input of the simulation.

A program is captured from a fake execution (:mod:`fsdp2prof.estimators.timeline.capture`), so its order, its
streams and its waits are those of FSDP2, autograd and the optimizer themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fsdp2prof.labels import AUTOGRAD_NODE, parse_label

Shape: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one operator, on any hardware."""

    kind: Literal["matmul", "attention", "pointwise", "copy", "host_to_device", "device_to_host", "host"]
    """``pointwise`` is everything that memory bandwidth bounds; ``copy`` moves without computing;
    ``host`` runs on the host, in its memory."""
    dtype: str
    """torch name of the widest operand's element type, without the module."""
    bytes: int
    """Read and written."""
    flops: int = 0
    """A multiplication and an addition are two; causal attention counts half of its square."""
    shape: Shape = ()
    """matmul: (batch, m, n, k); attention: (batch, heads, query length, key length, head dimension, heads of
    keys and values, head dimension of values)."""
    backward: bool = False
    """Whether this is the backward of attention."""
    unaligned: bool = False
    """Whether rows of a matrix begin at addresses that 16 does not divide."""
    gradients: int = 2
    """Of a forward's work: how many works of its size its backward needs, one for each operand that needs a
    gradient."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work queued on a stream; no work is an operator that only the host runs (a view, an allocation)."""

    stream: int
    op: str
    work: Work | None


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective queued on a stream."""

    stream: int
    op: str
    """One of :data:`~fsdp2prof.vocabulary.OPS`."""
    group: str
    """Communicator: collectives that share one run in order."""
    mesh_dim: str
    group_size: int
    dtype: str
    nelems_in: int
    nelems_out: int
    payload_bytes: int
    event: int = -1
    """Recorded when it ends, if it runs on the communicator's own stream; -1: it occupies ``stream``."""
    chosen: tuple[int, int] | None = None
    """Of a dispatch that sends a token once to each place with any of its experts: the number of a token's
    experts, and of all experts."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event recorded on a stream."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream waits for an event."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waits for an event (-1: for everything queued on ``stream``)."""

    stream: int
    event: int = -1
    call: str = "cudaEventSynchronize"


@dataclass(frozen=True, slots=True)
class Enter:
    """A labelled range begins on the host."""

    name: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The innermost labelled range ends."""


Command: TypeAlias = "Kernel | Collective | Record | Wait | HostWait | Enter | Leave"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One training step of one rank."""

    commands: list[Command]
    streams: int
    """Stream 0 is the compute stream."""
    parameters: int
    tokens: int
    """Tokens that this rank trains on in a step, before tensor and context parallelism divide the work."""
    model_flops: int
    """Operations of the matrix products and attention of one forward and backward, without recomputation."""
    left_out: int = 0
    """Micro-batches that were not captured: each is like the second of the three that were."""
    references: tuple[str, ...] = ()
    """Parts of the model in plain torch that other libraries' kernels usually replace, one sentence each."""
    guessed_fusion: str | None = None
    """The reason compiled blocks were captured uncompiled, with the compiler's fusion guessed."""


_OF_EXPERTS = ("::topk", "grouped_mm")
"""Ends of operators; torch before 2.8 has no grouped product."""


def has_experts(program: Program) -> bool:
    """Whether a mixture of experts runs: a router chooses the largest scores, or products are grouped."""
    return any(isinstance(one, Kernel) and one.op.endswith(_OF_EXPERTS) for one in program.commands)


WITHOUT_GRADIENTS = "fsdp2prof::without_gradients"
"""Range around each forward of a model that runs forward only."""


def labelled(commands: Iterable[Command]) -> Iterator[tuple[Command, list[str]]]:
    """Yield every command with the names of the ranges around it, the outermost first.

    A range's own ends are inside of it. The list is one and the same, and changes from command to command.
    """
    names: list[str] = []
    for command in commands:
        if isinstance(command, Enter):
            names.append(command.name)
        yield command, names
        if isinstance(command, Leave) and names:
            names.pop()


def in_backward(names: Iterable[str]) -> bool:
    """Whether ranges of these names enclose a backward's commands."""
    return any(name.startswith(AUTOGRAD_NODE) for name in names)


def ends_of_backward(commands: Sequence[Command]) -> list[int]:
    """Positions of the ends of all backward passes."""
    return [
        position
        for position, (command, names) in enumerate(labelled(commands))
        if isinstance(command, Leave) and in_backward(names) and not in_backward(names[:-1])
    ]


def model_flops_of(commands: Iterable[Command]) -> int:
    """Operations of the products and attention of one forward and backward, recomputation left out.

    Each of a trained forward has two of its size in backward, with a frozen weight one; a forward without
    gradients has none.
    """
    flops = 0
    for command, names in labelled(commands):
        if isinstance(command, Kernel) and command.work is not None and not in_backward(names):
            flops += command.work.flops * (1 if WITHOUT_GRADIENTS in names else 1 + command.work.gradients)
    return flops


_BEGINS = ("pre_forward", "pre_backward")
_ENDS = ("post_forward", "post_backward_reshard", "post_backward_accumulate", "post_backward_reduce")


def within_blocks(commands: Sequence[Command], blocks: tuple[str, ...]) -> Iterator[tuple[Command, bool]]:
    """Yield every command with whether it is a block's own, outside of FSDP2's labels."""
    names = frozenset(blocks)
    depth, inside = 0, False
    labels: list[bool] = []
    for command in commands:
        if isinstance(command, Enter):
            label = parse_label(command.name)
            own = label is not None and label.kind != "root"
            labels.append(own)
            depth += own
            if label is not None and label.fqn in names and label.kind in _BEGINS:
                inside = True
            elif label is not None and (label.kind in _ENDS or label.kind in _BEGINS):
                inside = False
        elif isinstance(command, Leave):
            depth -= labels.pop()
        yield command, inside and not depth
