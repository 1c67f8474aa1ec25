"""A program as float8 training changes it: faster products, casts before them, narrower gathers.

With tensorwise scaling torchao's parallel layers cast what tensor parallelism gathers (the input of a block's
attention and feed-forward, and the gradients of their outputs) before they gather it, and the products behind
take it as it comes; other recipes gather in the compute dtype. Source: torchao's
``float8/float8_tensor_parallel.py``, torchtitan's ``parallelize.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import dtype_bytes, values_of
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.sharding.groups import ParameterGroup, ShardedParameter, parameter_groups
from fsdp2prof.estimators.simulate.program import (
    Collective,
    Command,
    Kernel,
    Program,
    Work,
    labelled,
    within_blocks,
)
from fsdp2prof.estimators.techniques.technique import About, Technique
from fsdp2prof.labels import parse_label

_SCALED = "aten::_scaled_mm"
_FLOAT8 = "float8_e4m3fn"
_LAYERS = (
    "float8: linear layers inside blocks run as torchao's Float8Linear, whose sizes are multiples of 16",
    "mxfp8: linear layers inside blocks run as torchao's MXFP8Linear with its CUDA kernels, whose sizes are "
    "multiples of 32",
)


class Float8Training(Technique):
    """Products in float8 or MXFP8, and weights gathered as float8 (``float8``, ``fp8_all_gather``).

    A capture has the compute dtype; executed for memory, the layers are those of :mod:`.layers`.
    """

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse MXFP8 in divided layers, and torchao's tensors where a number of ranks is resharded to."""
        if policy.float8 == "mxfp8" and mesh.tp > 1:
            raise ModelError("float8: mxfp8 under tensor parallelism is not modelled: leave tp=1")
        if policy.fp8_all_gather and any(isinstance(value, int) for value in values_of(policy.reshard)):
            raise ModelError("reshard to a number of ranks is not supported by FSDP2 with float8 all-gather")

    def change_program(self, program: Program, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Program:
        """Multiply as in the recipe, and gather weights as float8 where the recipe does."""
        if policy.float8 is not None:
            fused = policy.compile and program.guessed_fusion is None
            narrow = mesh.tp > 1 and policy.float8 == "tensorwise"
            program = _in_float8(program, model.blocks, fused=fused, casts_before_gathers=narrow)
        if policy.fp8_all_gather:
            program = _with_float8_gathers(program, parameter_groups(model, mesh, policy))
        return program

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterator[str]:
        """Which layers run, how products are costed, and how weights are gathered."""
        if about == "memory" and policy.float8 is not None:
            yield _LAYERS[policy.float8 == "mxfp8"]
            if mesh.tp > 1:
                yield (
                    "float8 under tensor parallelism: activations are gathered first and cast then, where "
                    "torchao's Float8ColwiseParallel casts first and gathers bytes"
                )
            if policy.fp8_all_gather:
                yield (
                    "float8 all-gather: shards cast before it, with scales computed for all weights after "
                    "the optimizer's step (precompute_float8_dynamic_scale_for_fsdp)"
                )
        elif about == "step" and policy.float8 is not None:
            yield "float8: products of the blocks at the float8 rate, both factors scaled and cast before"
        elif about == "communication" and policy.fp8_all_gather:
            yield "float8 scales are computed once a step in one all-reduce over all float8 weights"


def _in_float8(
    program: Program, blocks: tuple[str, ...], *, fused: bool = False, casts_before_gathers: bool = False
) -> Program:
    """Multiply in float8 inside the blocks; both factors are scaled and cast before, in one pass each.

    A pass reads a factor twice (for its largest value, and to cast it) and writes it at half the size. Where
    the compiler fuses, what made the factor finds its largest value (torchao's ``float8_roofline``).
    ``casts_before_gathers``: tensor parallelism gathers what is cast already.
    """
    moved_an_element = 3 if fused else 5
    gathered = _gathered(program, blocks) if casts_before_gathers else frozenset()
    made: list[Command] = []
    narrow = False  # behind a gather, up to the first product: copies that put the ranks' parts in order
    for command, inside in within_blocks(program.commands, blocks):
        if inside and casts_before_gathers and _is_gather(command):
            made += _cast_and_gather(command, moved_an_element)
            narrow = True
            continue
        work = command.work if isinstance(command, Kernel) else None
        if not inside or work is None or not isinstance(command, Kernel):
            made.append(command)
        elif work.kind == "matmul":
            narrow = False
            made += _product(command, work, moved_an_element, gathered)
        elif narrow and work.kind == "copy":
            made.append(replace(command, work=replace(work, bytes=work.bytes // 2)))
        else:
            made.append(command)
    return replace(program, commands=made)


def _product(kernel: Kernel, work: Work, moved_an_element: int, gathered: frozenset[int]) -> list[Command]:
    """Return the casts of the factors that are none of the gathered ones, and the product."""
    batch, m, n, k = work.shape
    factors = batch * m * k, batch * k * n
    cast = sum(elements for elements in factors if elements not in gathered)
    made: list[Command] = []
    if cast:
        casts = Work("pointwise", work.dtype, moved_an_element * cast)
        made.append(Kernel(kernel.stream, "float8_cast", casts))
    scaled = replace(work, dtype=_FLOAT8, bytes=work.bytes - sum(factors))
    return [*made, replace(kernel, op=_SCALED, work=scaled)]


def _is_gather(command: Command) -> bool:
    return isinstance(command, Collective) and command.mesh_dim == "tp" and command.op == "all_gather"


def _gathered(program: Program, blocks: tuple[str, ...]) -> frozenset[int]:
    """Elements that tensor parallelism gathers in the blocks: a factor of this size was gathered."""
    return frozenset(
        command.nelems_out
        for command, inside in within_blocks(program.commands, blocks)
        if inside and isinstance(command, Collective) and _is_gather(command)
    )


def _cast_and_gather(command: Command, moved_an_element: int) -> list[Command]:
    assert isinstance(command, Collective)
    casts = Work("pointwise", command.dtype, moved_an_element * command.nelems_in)
    narrower = replace(command, dtype=_FLOAT8, payload_bytes=command.nelems_out)
    return [Kernel(0, "float8_cast", casts), narrower]


def _with_float8_gathers(program: Program, groups: Sequence[ParameterGroup]) -> Program:
    """Gather what ``groups`` gather as float8 so, and compute the scales of all weights once a step.

    A group's all-gather moves as many bytes as the group has in its dtypes (mixed ones go as raw bytes), and
    so does the copy out of its buffer; the cast of the shard before reads the same. The scales take a pass
    over the sharded weights after the optimizer, and one all-reduce.
    """
    by_fqn = {group.fqn: group for group in groups if _float8_weights(group)}
    shares: dict[str, float] = {}
    made: list[Command] = []
    gather: Collective | None = None
    for command, names in labelled(program.commands):
        label = parse_label(names[-1]) if names else None
        fqn = "" if label is None or label.fqn is None else label.fqn
        if label is None or fqn not in by_fqn:
            made.append(command)
        elif label.kind == "all_gather" and isinstance(command, Collective):
            gather = _gather_of(command, by_fqn[fqn])
            shares[fqn] = gather.payload_bytes / command.payload_bytes
            made.append(gather)
        elif label.kind == "all_gather_copy_out" and isinstance(command, Kernel) and command.work is not None:
            moved = round(command.work.bytes * shares.get(fqn, 1.0))
            made.append(replace(command, work=replace(command.work, bytes=moved)))
        else:
            made.append(command)
    if gather is not None:
        made += _scales(gather, [one for group in by_fqn.values() for one in _float8_weights(group)])
    return replace(program, commands=made)


def _float8_weights(group: ParameterGroup) -> list[ShardedParameter]:
    return [parameter for parameter in group.parameters if parameter.gather_dtype == _FLOAT8]


def _gather_of(command: Collective, group: ParameterGroup) -> Collective:
    """The same all-gather of the group's bytes."""
    nbytes = sum(one.padded_numel * dtype_bytes(one.gather_dtype) for one in group.parameters)
    return replace(
        command,
        dtype="uint8",
        nelems_in=nbytes // command.group_size,
        nelems_out=nbytes,
        payload_bytes=nbytes,
    )


def _scales(gather: Collective, weights: Sequence[ShardedParameter]) -> list[Command]:
    """The largest value of every weight: of this rank's shards, then of all ranks'."""
    read = sum(one.padded_shard_numel * dtype_bytes(one.dtype) for one in weights)
    return [
        Kernel(0, "float8_scales", Work("pointwise", weights[0].dtype, read)),
        replace(
            gather,
            stream=0,
            op="all_reduce",
            dtype="float32",
            nelems_in=len(weights),
            nelems_out=len(weights),
            payload_bytes=4 * len(weights),
            event=-1,
        ),
    ]
