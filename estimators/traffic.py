"""Traffic of tensor, context and pipeline parallelism, counted analytically beside FSDP's.

Tensor parallelism is Megatron's with sequence-parallel norms and residuals, as the built-in plans apply it.
Context parallelism is torch's ring attention: K and V all-gathered in forward and again in backward, their
gradients passed around the ring in fp32. Pipeline parallelism sends one activation tensor forward and its
gradient back per micro-batch. B batch, S sequence, D model dim, c bytes of the compute dtype.

FSDP2's collectives of one training step, counted: the events of its schedule, summed by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from fsdp2prof.estimators.config.catalog import TransformerConfig
from fsdp2prof.estimators.config.choices import dtype_bytes
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.pipeline import has_ends
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.sharding.groups import ParameterGroup
from fsdp2prof.estimators.techniques.pipeline_order import neighbours_of
from fsdp2prof.results.estimate import CommRow
from fsdp2prof.schedule import Axis, Event, block_counts
from fsdp2prof.units import plural


@dataclass(slots=True)
class Ledger:
    """Collectives summed by row key, in order of first appearance."""

    rows: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    def add(
        self,
        *,
        root: int,
        fqn: str | None,
        phase: str,
        op: str,
        axis: Axis,
        dtype: str,
        payload_bytes: int,
        count: int = 1,
        wire_bytes: int | None = None,
        together: bool = False,
    ) -> None:
        """Add ``count`` collectives of so many bytes each, or ``together``; one rank sends nothing.

        Wire bytes follow from the op unless given.
        """
        if axis.size == 1 or count == 0:
            return
        if wire_bytes is None:
            passes = 2 if op == "all_reduce" else 1
            wire_bytes = passes * payload_bytes * (axis.size - 1) // axis.size
        key = (root, fqn, phase, op, axis.process_group, axis.mesh_dim, dtype, axis.size)
        row = self.rows.setdefault(key, [0, 0, 0])
        times = 1 if together else count
        row[:] = [row[0] + count, row[1] + times * payload_bytes, row[2] + times * wire_bytes]

    def add_event(self, event: Event, count: int = 1, elements: int | None = None) -> None:
        """Add a collective of a schedule ``count`` times; ``elements`` are those of all of them together."""
        self.add(
            root=event.group.root,
            fqn=event.group.fqn,
            phase=event.phase,
            op=event.op,
            axis=event.axis,
            dtype=event.dtype,
            payload_bytes=event.payload_bytes if elements is None else elements * dtype_bytes(event.dtype),
            count=count,
            together=elements is not None,
        )

    def add_events(self, events: Iterable[Event]) -> None:
        """Add the collectives among the events of a schedule."""
        for event in events:
            if event.op not in ("copy_out", "reshard"):
                self.add_event(event)

    def add_forward_of(self, other: Ledger, root: int) -> None:
        """Add what ``other`` has of forward, as of the root with that index."""
        for (_, fqn, phase, *rest), sums in other.rows.items():
            if phase == "forward":
                row = self.rows.setdefault((root, fqn, phase, *rest), [0, 0, 0])
                row[:] = [mine + more for mine, more in zip(row, sums, strict=True)]

    def to_rows(self) -> list[CommRow]:
        """The rows as results."""
        names = ("root", "fqn", "phase", "op", "process_group", "mesh_dim", "dtype", "group_size")
        return [
            CommRow(
                **dict(zip(names, key, strict=True)),  # type: ignore[arg-type]
                count=count,
                payload_bytes=payload,
                wire_bytes=wire,
            )
            for key, (count, payload, wire) in self.rows.items()
        ]


def counted_by_execution(model: Model, mesh: MeshSpec, policy: PolicySpec) -> bool:
    """Whether tensor and expert parallelism are executed to count their collectives: no formula covers
    them.

    Frozen parameters decide which gradients are reduced or exchanged, and a chunked loss decides the
    number of reductions of the logits' normalizers.
    """
    plan = model.tensor_parallel
    if mesh.tp > 1 and plan is not None:
        whole = not plan.divides_sequence(policy.sequence_parallel)
        return whole or not plan.is_analysed or policy.freezes or policy.loss_in_pieces
    return mesh.ep > 1 and (model.config is None or policy.freezes)


def add_parallel_traffic(
    ledger: Ledger, model: Model, groups: Sequence[ParameterGroup], mesh: MeshSpec, policy: PolicySpec
) -> list[str]:
    """Add TP, EP, CP and PP collectives of a step to ``ledger``; return the assumptions made.

    Where tensor parallelism is not known by formula, it is counted elsewhere, expert parallelism with it.
    """
    config, executed = model.config, counted_by_execution(model, mesh, policy)
    owner_of = {part: group.fqn for group in groups for part in group.fqn.split(", ")}
    blocks = {block: owner_of.get(block, "") for block in model.blocks}
    notes: list[str] = []
    if mesh.tp > 1 and config is not None and not executed:
        _add_tensor_parallel(ledger, config, list(blocks.values()), mesh, policy)
        in_parallel = model.divides_logits(mesh.tp, policy.loss_parallel)
        _add_ends(ledger, config, owner_of, mesh, policy, in_parallel=in_parallel)
        _add_replicated_gradients(ledger, groups, Axis(size=mesh.tp, mesh_dim="tp"), policy)
        notes.append(
            "tensor parallelism as analysed: sequence-parallel norms and residuals, vocabulary-sharded "
            f"embedding and head, loss {'parallel' if in_parallel else 'over gathered logits'}"
        )
    if mesh.ep > 1:
        if config is not None and not executed:
            _add_expert_parallel(ledger, config, blocks, model.experts, mesh, policy)
        notes.append(_expert_note(model, mesh, policy))
    if mesh.cp > 1:
        width = model.ring_share(mesh.tp, repeat_kv=policy.repeat_kv)
        _add_context_parallel(ledger, width, list(blocks.values()), mesh, policy)
        heads = (
            "copied to every query head"
            if policy.repeat_kv and config is not None
            else "with their own heads"
        )
        notes.append(f"context parallelism as analysed: K and V move {heads}")
    if mesh.pp > 1:
        _add_pipeline(ledger, model, mesh, policy)
        notes.append(
            f"pipeline stage {policy.pp_stage} of {mesh.pp} as analysed: "
            f"{plural(len(model.blocks), 'layer')} of {model.blocks[0]} to {model.blocks[-1]}, one send per "
            "micro-batch and neighbour, gradients reduced once a run of the schedule"
        )
    return notes


def _expert_note(model: Model, mesh: MeshSpec, policy: PolicySpec) -> str:
    config = model.config
    held = "a part" if not model.experts else str(model.expert_count)
    chosen = f" go to {config.experts.top_k}," if config is not None and config.experts is not None else ""
    shares = "; tensor-parallel ranks share theirs among themselves" if mesh.tp > 1 else ""
    return (
        f"expert parallelism: each of {mesh.ep} ranks holds {held} of a block's experts whole; "
        f"tokens{chosen} spread evenly, none is dropped, and this rank's experts receive "
        f"{policy.imbalance:g} times the mean{shares}"
    )


def _add_tensor_parallel(
    ledger: Ledger, config: TransformerConfig, owners: Sequence[str], mesh: MeshSpec, policy: PolicySpec
) -> None:
    """Each block gathers the sequence before attention and feed-forward and scatters it after."""
    add = _adder(ledger, Axis(size=mesh.tp, mesh_dim="tp"), policy)
    hidden = _tokens(mesh, policy) * config.dim
    # torchao's parallel layers cast before they gather, with tensorwise scaling only
    gathered = "float8_e4m3fn" if policy.float8 == "tensorwise" else policy.compute_dtype
    for block, fqn in enumerate(owners):
        add(fqn, "forward", "all_gather", 2, hidden, gathered)
        add(fqn, "forward", "reduce_scatter", 2, hidden)
        # Recomputing stops once the last saved tensor is back, before the reduce-scatter that ends a block
        # or a child.
        gathers = 2 * policy.checkpoints(block)
        scatters = 1 if gathers and policy.ac not in ("op", "children") else 0
        add(fqn, "backward", "all_gather", 2 + gathers, hidden, gathered)
        add(fqn, "backward", "reduce_scatter", 2 + scatters, hidden)


def _add_ends(
    ledger: Ledger,
    config: TransformerConfig,
    owner_of: Mapping[str, str],
    mesh: MeshSpec,
    policy: PolicySpec,
    *,
    in_parallel: bool,
) -> None:
    """The embedding scatters its partial sums; the head gathers the sequence; the loss joins the logits."""
    add = _adder(ledger, Axis(size=mesh.tp, mesh_dim="tp"), policy)
    tokens = _tokens(mesh, policy)
    is_first, is_last = has_ends(policy.pp_schedule, mesh.pp, policy.pp_stage)
    if is_first:
        embedding = owner_of.get("tok_embeddings", "")
        add(embedding, "forward", "reduce_scatter", 1, tokens * config.dim)
        add(embedding, "backward", "all_gather", 1, tokens * config.dim)
    if is_last:
        head = owner_of.get("output", "")
        add(head, "forward", "all_gather", 1, tokens * config.dim)
        add(head, "backward", "reduce_scatter", 1, tokens * config.dim)
        if in_parallel:
            add("", "forward", "all_reduce", 3, tokens, "float32")
        else:
            add(head, "forward", "all_gather", 1, tokens * config.vocab_size)


def _tokens(mesh: MeshSpec, policy: PolicySpec) -> int:
    return policy.sequences * policy.seq_len // mesh.cp


def _adder(ledger: Ledger, axis: Axis, policy: PolicySpec) -> Callable[..., None]:
    """Make ``add(fqn, phase, op, count per micro-batch, elements, dtype)`` of the ranks of one axis."""

    def add(
        fqn: str, phase: str, op: str, each: int, elements: int, dtype: str = policy.compute_dtype
    ) -> None:
        ledger.add(
            root=0,
            fqn=fqn,
            phase=phase,
            op=op,
            axis=axis,
            dtype=dtype,
            payload_bytes=elements * dtype_bytes(dtype),
            count=each * policy.grad_accum,
        )

    return add


def _add_replicated_gradients(
    ledger: Ledger, groups: Sequence[ParameterGroup], axis: Axis, policy: PolicySpec
) -> None:
    """Norm weights are replicated over tp but see a part of the sequence: their gradients are all-reduced."""
    counts = block_counts(policy.grad_accum, policy.sync)
    accumulated = policy.grad_accum > 1 and policy.sync == "last"
    dtype = policy.gradient_dtype if accumulated else policy.compute_dtype
    for group in groups:
        for parameter in group.parameters:
            if parameter.replicated and parameter.requires_grad:
                ledger.add(
                    root=0,
                    fqn=group.fqn,
                    phase="backward",
                    op="all_reduce",
                    axis=axis,
                    dtype=dtype,
                    payload_bytes=parameter.numel * dtype_bytes(dtype),
                    count=counts.reductions * policy.pp_runs,
                )


def _add_expert_parallel(
    ledger: Ledger,
    config: TransformerConfig,
    blocks: Mapping[str, str],
    sparse: Sequence[str],
    mesh: MeshSpec,
    policy: PolicySpec,
) -> None:
    """Rows go to their experts and come back, and so do their gradients; recomputing sends them again.

    ``blocks`` are those of this rank with their groups, ``sparse`` its modules of experts.

    Under both kinds of checkpointing the exchange is recomputed up to what came back, whose sum with the
    tokens saves no more than its place.
    """
    assert config.experts is not None
    add = _adder(ledger, Axis(size=mesh.ep, mesh_dim="ep"), policy)
    rows = _tokens(mesh, policy) * config.experts.top_k
    sizes = {"there": rows, "back": ceil(rows * policy.imbalance)}
    for block, (name, fqn) in enumerate(blocks.items()):
        if not any(one.startswith(f"{name}.") for one in sparse):
            continue
        recomputes = policy.checkpoints(block)
        for phase, times in (("forward", 1), ("backward", int(recomputes))):
            add(fqn, phase, "all_to_all", times, config.experts.count, "int64")
        for size in sizes.values():
            elements = size * config.dim
            for phase, times in (("forward", 1), ("backward", 1 + recomputes)):
                add(fqn, phase, "all_to_all", times, elements)


def _add_context_parallel(
    ledger: Ledger, width: int, owners: Sequence[str], mesh: MeshSpec, policy: PolicySpec
) -> None:
    """Each block's K and V, ``width`` elements a position on this rank's heads, go around the ring."""
    axis = Axis(size=mesh.cp, mesh_dim="cp")
    add = _adder(ledger, axis, policy)
    elements = policy.sequences * policy.seq_len * width
    gradients = elements // mesh.cp * dtype_bytes("float32")
    for block, fqn in enumerate(owners):
        add(fqn, "forward", "all_gather", 1, elements)
        add(fqn, "backward", "all_gather", 1 + (policy.checkpoints(block) and policy.ac != "op"), elements)
        ledger.add(
            root=0,
            fqn=fqn,
            phase="backward",
            op="all_to_all",
            axis=axis,
            dtype="float32",
            payload_bytes=gradients,
            count=mesh.cp * policy.grad_accum,
            wire_bytes=gradients,
        )


def _add_pipeline(ledger: Ledger, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
    assert model.width is not None
    tokens = model.hidden_length(mesh.tp, policy.seq_len // mesh.cp, policy.sequence_parallel)
    local = policy.sequences * tokens * model.width
    payload = local * dtype_bytes(policy.compute_dtype)
    before, after = neighbours_of(policy.pp_schedule, mesh.pp, policy.pp_stage)
    sends = {"forward": after, "backward": before}
    for phase, of_stages in sends.items():
        ledger.add(
            root=0,
            fqn="",
            phase=phase,
            op="send_recv",
            axis=Axis(size=mesh.pp, mesh_dim="pp"),
            dtype=policy.compute_dtype,
            payload_bytes=payload,
            count=policy.grad_accum * of_stages,
            wire_bytes=payload,
        )
