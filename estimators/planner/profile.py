"""A model as the search knows it: shallow runs of the execution engine, taken apart by block.

One capture and one memory execution of a few blocks are made for each way to divide and to checkpoint a
block; where blocks are of several kinds, one of each is taken apart. Their kernels are costed for any batch
and sequence at the shapes they would have there, by the same cost model as the engine's; their live bytes
grow with the tokens and with the blocks.

Groups of their own for what lies before and after the blocks: embedding, and norm with head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.categories import categorize
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import CheckpointingMode, dtype_bytes
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import MemoryPrediction, predict_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.planner.request import PlanRequest
from fsdp2prof.estimators.sharding.groups import ShardedParameter, parameter_groups
from fsdp2prof.estimators.simulate.extend import CannotRepeatError
from fsdp2prof.estimators.simulate.extend_commands import Part, parts_of
from fsdp2prof.estimators.simulate.program import (
    Collective,
    Command,
    Enter,
    Kernel,
    Leave,
    Shape,
    Work,
    labelled,
)
from fsdp2prof.estimators.step import program_of
from fsdp2prof.estimators.techniques.registry import part_of
from fsdp2prof.estimators.timeline.capture import execute_and_capture
from fsdp2prof.estimators.timeline.costs import HostPace
from fsdp2prof.tables.columns import BoolArray, IntArray

Shapes: TypeAlias = tuple[Shape, ...]
"""Shapes of parameters."""

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)

_SHARDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One shallow run to make."""

    model: ModelSpec
    tp: int
    policy: PolicySpec
    ep: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Work of device and host in a forward or a backward of one block, or outside of all blocks."""

    works: tuple[Work, ...]
    """Kernels of the model's own, at the shapes of the probe."""
    exchanges: tuple[tuple[str, int, str], ...]
    """Collectives (op, payload bytes, mesh dimension) that the compute stream waits for."""
    host_ns: int
    """The host needs to issue all of it."""
    gather_host_ns: int
    """The part of ``host_ns`` for FSDP's all-gathers."""
    reduce_host_ns: int
    """The part of ``host_ns`` for FSDP's reductions of gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockKind:
    """One of the kinds of blocks that a model has."""

    count: int
    """Number of the model's blocks of this kind."""
    forward: Stretch
    backward: Stretch
    dense: Shapes
    """Parameters that FSDP shards over all of dp_shard x cp, as a tensor-parallel rank has them."""
    experts: Shapes
    """Parameters of its experts, as an expert-parallel rank has them."""
    model_flops: int
    saved_bytes: int
    """From its forward to its backward, at the probe's tokens."""
    peak_bytes: int
    """Memory of its backward in addition to its saved tensors, at the probe's tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProfile:
    """A shallow run, taken apart."""

    tp: int
    ep: int
    batch_size: int
    seq_len: int
    token_factor: int
    """Sizes that it divides, and no parameter's, are numbers of tokens, or parts of them."""
    kinds: tuple[BlockKind, ...]
    ends: Stretch
    """Embedding, head and loss, forward and backward."""
    root: Shapes
    """Parameters outside of the blocks."""
    tail: Shapes
    """Those of them that may form a group after the last block; none where they cannot."""
    update_bytes: int
    """That clipping and the optimizer move, of all parameters of the probe."""
    update_host_ns: int
    """The host needs to issue them."""
    shard_numel: int
    """Elements of the probe's shard."""
    model_flops_ends: int
    held_at_loss: tuple[Held, Held]
    """Alive at the loss in addition to the blocks' saved tensors, at the probe's tokens: at the peak of
    the memory that grows with the tokens, and at the peak of the memory that does not."""
    unused_bytes: int
    """Reserved but unused bytes at the loss, at the probe's tokens."""
    pool_bytes: int
    """The all-gather's own pool, when the root is gathered."""
    element_bytes: tuple[int, int, int]
    """Bytes of an element of a shard, of a gathered parameter and of a reduced gradient, in the probe."""


def probes(request: PlanRequest, sizes: Sequence[tuple[int, int]], model: Model) -> list[Probe]:
    """Return the shallow runs that a search needs, for each (tp, ep) of its meshes."""
    modes: tuple[CheckpointingMode, ...] = ("none", "op", "full")
    fixed = request.fixed_policy.get("ac")
    if fixed in modes:
        modes = ("none", fixed) if fixed != "none" else ("none",)
    elif fixed is not None:
        modes = ("none", "full")
    policy = replace(request.policy, reshard="default", grad_accum=1, batch_size=_batch(request, model))
    return [
        Probe(model=request.model, tp=tp, ep=ep, policy=replace(policy, ac=mode))
        for tp, ep in sizes
        for mode in modes
    ]


def measure(probe: Probe) -> BlockProfile:
    """Run the engine on a few blocks. Raises ``ModelError`` for a model whose blocks do not repeat."""
    policy = probe.policy
    whole = build_model(probe.model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    if not whole.blocks or not whole.blocks[0].endswith("0"):
        raise ModelError(f"plan: {whole.name} has no repeated blocks to search with")
    kinds = repeated_kinds(whole)
    shallow = len(kinds) if set(kinds) == set(range(len(whole.blocks))) else max(kinds) + 2
    spec = probe.model.with_layers(shallow)
    mesh = MeshSpec(dp_shard=_SHARDS * probe.ep, tp=probe.tp, ep=probe.ep)
    built = build_model(spec, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    at_once = execute_and_capture(spec, mesh, policy, built)
    execution, program = at_once or (None, program_of(spec, mesh, policy))
    sharded = _Sharded(built, mesh, policy)
    try:
        parts = _head_apart(parts_of(program, built.blocks[0].removesuffix("0"), shallow), built.blocks[-1])
    except CannotRepeatError:
        raise ModelError(f"plan: the blocks of {built.name} do not run one after the other") from None
    prediction = predict_memory(spec, mesh, policy, executed=execution)
    alive = Alive(prediction, built.blocks)
    found = []
    for block, count in sorted(kinds.items()):
        own = [part for part in parts if part.block == block]
        found.append(_kind(count, own, sharded, alive, built.blocks[: block + 1]))
    ends, update = _split([part.commands for part in parts if part.ladder is None])
    saved = sum(map(alive.saved, built.blocks))
    first, second = alive.at_loss()
    of_blocks = [work for part in parts if part.ladder == 0 for work in _stretch(part.commands).works]
    return BlockProfile(
        tp=probe.tp,
        ep=probe.ep,
        batch_size=policy.batch_size,
        seq_len=policy.seq_len,
        token_factor=policy.batch_size if whole.experts else 1,
        kinds=tuple(found),
        ends=_stretch(ends),
        root=sharded.root,
        tail=sharded.tail,
        update_bytes=sum(c.work.bytes for c in update if isinstance(c, Kernel) and c.work),
        update_host_ns=_host_ns(update),
        shard_numel=sharded.shard_numel,
        model_flops_ends=program.model_flops - _model_flops(of_blocks),
        held_at_loss=(_without(saved, first), _without(saved, second)),
        unused_bytes=max(0, prediction.estimate.peak.streams["default"] - alive.active()),
        pool_bytes=prediction.estimate.peak.streams.get("all_gather_copy_in", 0),
        element_bytes=element_bytes(policy),
    )


def _without(saved: int, held: Held) -> Held:
    return replace(held, of_tokens=max(0, held.of_tokens - saved))


def element_bytes(policy: PolicySpec) -> tuple[int, int, int]:
    """Bytes of an element of a shard, of a gathered parameter, and of a gradient that is reduced."""
    own, gathered, reduced = map(
        dtype_bytes, (policy.orig_dtype, policy.compute_dtype, policy.gradient_dtype)
    )
    return own, gathered, reduced


def repeated_kinds(model: Model) -> dict[int, int]:
    """Return one block of each kind with the number of its kind; the first does not repeat.

    Each block before the repeating ones is a separate kind; one whole period covers the others.
    """
    blocks, start, period = len(model.blocks), model.pattern.start, model.pattern.period
    first = max(start, 1)
    if first + period >= blocks and (start, period) != (0, 1):
        return dict.fromkeys(range(blocks), 1)
    kinds = dict.fromkeys(range(start), 1)
    for block in range(start, blocks):
        at = first + (block - first) % period
        kinds[at] = kinds.get(at, 0) + 1
    return kinds


class _Sharded:
    """The parameters of a shallow run by group, as one rank has them."""

    def __init__(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        part = part_of(model, mesh, policy)
        groups = parameter_groups(part, mesh, policy)
        self.shard_numel = sum(p.padded_shard_numel for group in groups for p in group.parameters)
        self._blocks: dict[str, list[ShardedParameter]] = {fqn: [] for fqn in model.blocks}
        outside: list[ShardedParameter] = []
        for group in groups:
            self._blocks.get(group.fqn, outside).extend(group.parameters)
        if not all(self._blocks.values()):
            raise ModelError(
                f"plan: the blocks of {model.name} are not sharded one by one: leave wrap at block"
            )
        self.root = tuple(p.shape for p in outside)
        self.tail: Shapes = ()
        if (units := units_of_ends(model)) is not None:
            own = parameter_groups(part, mesh, replace(policy, wrap=units))
            label = units[-1].replace("+", ", ")
            self.tail = tuple(p.shape for group in own if group.fqn == label for p in group.parameters)

    def of_block(self, fqn: str, *, experts: bool) -> Shapes:
        """Shapes of a block's parameters."""
        return tuple(p.shape for p in self._blocks[fqn] if p.is_expert == experts)


def _model_flops(works: Iterable[Work]) -> int:
    """Of a forward and its backward."""
    return sum(work.flops * (1 + work.gradients) for work in works)


def _kind(count: int, parts: list[Part], sharded: _Sharded, alive: Alive, until: Sequence[str]) -> BlockKind:
    """Take a block apart: the last of ``until``, whose activations are alive while it runs backward."""
    fqn = until[-1]
    if len(parts) != 2:
        raise ModelError("plan: the model's blocks do not run once forward and once backward")
    forward, backward = (_stretch(part.commands) for part in parts)
    return BlockKind(
        count=count,
        forward=forward,
        backward=backward,
        dense=sharded.of_block(fqn, experts=False),
        experts=sharded.of_block(fqn, experts=True),
        model_flops=_model_flops(forward.works),
        saved_bytes=alive.saved(fqn),
        peak_bytes=alive.in_backward(fqn, until),
    )


def _batch(request: PlanRequest, model: Model) -> int:
    """A batch whose token count differs from every size of the model, so that shapes show which is which."""
    shapes = {size for parameter in model.module.parameters() for size in parameter.shape}
    if model.experts:  # whose rows are a part of the tokens
        return next((prime for prime in _PRIMES if all(size % prime for size in shapes)), _PRIMES[-1])
    sizes = {size // part for size in shapes for part in (1, 2, 4, 8, 16)}
    return next(batch for batch in (1, 3, 5, 7) if batch * request.policy.seq_len not in sizes or batch == 7)


def _head_apart(parts: Sequence[Part], last: str) -> list[Part]:
    """Part head and loss from the last block's forward: its gather for backward comes after them."""
    found: list[Part] = []
    label = f"FSDP::post_forward ({last})"
    for part in parts:
        names = [command.name if isinstance(command, Enter) else "" for command in part.commands]
        if part.ladder != 0 or label not in names:
            found.append(part)
            continue
        end = len(names) - names[::-1].index(label)
        end += next(i for i, command in enumerate(part.commands[end:]) if isinstance(command, Leave)) + 1
        found += [replace(part, commands=part.commands[:end]), Part(part.commands[end:])]
    return found


def _split(outside: Sequence[list[Command]]) -> tuple[list[Command], list[Command]]:
    """Split the work outside blocks into the model's own work and the update of the parameters."""
    ends = [command for part in outside[:-1] for command in part]
    last = outside[-1]
    cut = next(
        (
            position
            for position, command in enumerate(last)
            if isinstance(command, Kernel) and "_foreach" in command.op
            if not _inside_fsdp(last[:position])
        ),
        len(last),
    )
    return [*ends, *last[:cut]], last[cut:]


def _inside_fsdp(before: Sequence[Command]) -> bool:
    depth = sum(isinstance(c, Enter) for c in before) - sum(isinstance(c, Leave) for c in before)
    return depth > 0


def _stretch(commands: Sequence[Command]) -> Stretch:
    works: list[Work] = []
    passed: list[tuple[str, int, str]] = []
    under: dict[str, list[Command]] = {"FSDP::all_gather": [], "FSDP::post_backward_reduce": []}
    for command, labels in labelled(commands):
        around = labels[:-1] if isinstance(command, Enter) else labels
        for prefix, inside in under.items():
            if any(label.startswith(prefix) for label in around):
                inside.append(command)
        if isinstance(command, Collective):
            if command.mesh_dim in ("tp", "ep"):
                passed.append((command.op, command.payload_bytes, command.mesh_dim))
        elif isinstance(command, Kernel) and command.work is not None and not _of_fsdp(labels):
            works.append(command.work)
    gathers, reductions = map(_host_ns, under.values())
    return Stretch(
        works=tuple(works),
        exchanges=tuple(passed),
        host_ns=_host_ns(commands),
        gather_host_ns=gathers,
        reduce_host_ns=reductions,
    )


def _of_fsdp(labels: Iterable[str]) -> bool:
    return any(label.startswith("FSDP::") for label in labels)


def _host_ns(commands: Iterable[Command]) -> int:
    pace = HostPace()
    cost = {Kernel: pace.operator_ns, Collective: pace.collective_ns, Enter: pace.label_ns, Leave: 0}
    return sum(cost.get(type(command), pace.event_ns) for command in commands)


_GROW_WITH_TOKENS = frozenset({"activation", "temporary", "input", "unattributed"})
_STATES = frozenset({"sharded_parameter", "optimizer_state"})


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes at one instant."""

    of_tokens: int
    """Bytes that grow with the tokens."""
    of_parameters: int
    """Gathered parameters, gradients, and buffers for them."""


class Alive:
    """The last step of an execution, with queries for its live memory. All sizes are bytes."""

    def __init__(self, prediction: MemoryPrediction, blocks: Sequence[str]) -> None:
        recording = prediction.recording
        table = categorize(attribute(recording, recording.steps), prediction.manifest, recording.end_ns)
        self._born, self._freed, self._size = table.alloc_order, table.free_order, table.size
        self._default = table.stream == 0
        self._token_sized = table.category.matches(lambda name: name in _GROW_WITH_TOKENS)
        self._states = table.category.matches(lambda name: name in _STATES)
        self._gradients = table.category.equals("sharded_gradient")
        gathered = table.category.equals("unsharded_parameter")
        last = table.step == int(table.step.max())
        self._forward = last & table.phase.equals("forward")
        self._backward = last & table.phase.equals("backward")
        self._of = {fqn: table.fqn.equals(fqn) for fqn in blocks}
        in_block = np.logical_or.reduce(list(self._of.values()))
        self._root_gathered = gathered & ~in_block
        self._begin = int(self._born[self._forward & in_block].max())
        """Beginning of the loss: after the last block's forward."""
        self._end = int(self._born[self._backward & in_block].min())

    def saved(self, fqn: str) -> int:
        """Activations of a block that are alive when backward begins."""
        kept = self._of[fqn] & self._token_sized & self._forward
        return int(self._size[kept & (self._born < self._end) & (self._freed >= self._end)].sum())

    def in_backward(self, fqn: str, blocks: Sequence[str]) -> int:
        """Most bytes that grow with the tokens in a block's backward, beside what ``blocks`` saved."""
        most = self._most(self._born[self._backward & self._of[fqn]], self._token_sized)
        return max(0, most - sum(map(self.saved, blocks)))

    def at_loss(self) -> tuple[Held, Held]:
        """Alive between the blocks' forward and their backward, in addition to states and the gathered
        root: at the peak of the memory that grows with the tokens, and at the peak of the memory that does
        not."""
        instants = self._born[(self._born >= self._begin) & (self._born <= self._end)]
        tokens = self._totals(instants, self._default & self._token_sized)
        others = self._default & ~(self._states | self._root_gathered | self._token_sized)
        parameters = self._totals(instants, others)
        made = [Held(*pair) for pair in zip(tokens.tolist(), parameters.tolist(), strict=True)]
        return max(made, key=lambda one: one.of_tokens), max(made, key=lambda one: one.of_parameters)

    def active(self) -> int:
        """Most bytes of the default stream in the last step."""
        return self._most(self._born[self._forward | self._backward], self._default)

    def _most(self, instants: IntArray, counted: BoolArray) -> int:
        return int(self._totals(instants, counted).max(initial=0))

    def _totals(self, instants: IntArray, counted: BoolArray) -> IntArray:
        born, freed, size = self._born[counted], self._freed[counted], self._size[counted]
        made = [int(size[(born <= instant) & (freed > instant)].sum()) for instant in instants.tolist()]
        return np.array(made, dtype=np.int64)


_MOST = 2
"""Modules on one side of the blocks that make groups: a plain decoder has no more."""


def units_of_ends(model: Model) -> tuple[str, ...] | None:
    """Return ``wrap`` with a group for each module before the blocks and one for all modules after them.

    ``None`` if one side has no modules, if they share a parameter, or if there are other towers.
    """
    if not model.blocks or model.towers:
        return None
    before: list[str] = []
    after: list[str] = []
    seen: dict[int, list[str]] = {}
    inside = set(model.blocks)
    side = before
    for fqn, module in model.module.named_modules():
        if fqn in inside or fqn.rpartition(".")[0] in inside:
            inside.add(fqn)
            side = after
            continue
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        if not fqn or any(seen.setdefault(id(parameter), side) is not side for parameter in own):
            return None
        side.append(fqn)
    if not 1 <= len(before) <= _MOST or not 1 <= len(after) <= _MOST:
        return None
    return ("block", *before, "+".join(after))
