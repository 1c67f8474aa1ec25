"""Known mistakes in how FSDP2 is set up: wrapping, optimizer, dtypes, meshes, devices, variables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import prod

from fsdp2prof.analyzers.findings import listed
from fsdp2prof.analyzers.layers import block_of, numbered
from fsdp2prof.analyzers.recorded_groups import frozen_roots
from fsdp2prof.analyzers.sharding.run_evidence import RunEvidence, find_in_variables, finding
from fsdp2prof.by_key import grouped, summed
from fsdp2prof.manifest import ParamGroupInfo, RankManifest, UnshardedInfo
from fsdp2prof.results.finding import EvidenceValue, Finding, Severity
from fsdp2prof.units import dtype_bytes

_FEW_PARAMETERS = 4
"""A model of fewer has nothing to wrap one by one."""
_TINY_BYTES, _MANY_UNITS = 1 << 20, 16
"""A unit that gathers less is tiny; so many of them are too many."""
_SMALL_BYTES = 8 << 20
"""Below it latency, not bandwidth, sets the time of an all-gather: two of half the size take longer."""
_LARGE_BYTES = 256 << 20
"""From here on memory that a mistake costs is worth failing a job in CI."""
_FROZEN_FRAC = 0.5
"""Of all elements, from which on the frozen ones are called the base of adapters."""
_HALF = ("bfloat16", "float16")
_DATA_DIMENSIONS = ("dp", "ddp", "cp", "data", "replicate", "context")
"""Beginnings of names of mesh dimensions over which gradients must be reduced."""


def find_mistakes(evidence: RunEvidence) -> list[Finding]:
    """Return the findings about the run's setup, in the order of the rules."""
    return [found for rule in _RULES for found in rule(evidence)]


def _wrappers(evidence: RunEvidence) -> Iterator[Finding]:
    if names := evidence.info.wrappers:
        yield finding("another_wrapper" if evidence.sharded else "not_fully_shard", {"wrappers": names})


def _root_only(evidence: RunEvidence) -> Iterator[Finding]:
    groups = grouped((group.root, group) for group in evidence.first.param_groups)
    blocks = _blocks_without_root(evidence)
    for root, members in groups.items():
        only = members[0]
        if (
            root in blocks
            or len(members) > 1
            or only.fqn
            or only.shard_world_size < 2
            or _is_gathered_once(only)
            or len(only.parameters) < _FEW_PARAMETERS
        ):
            continue
        whole = _gathered_bytes(only)
        severity: Severity = "high" if whole >= _LARGE_BYTES else "medium" if whole >= _SMALL_BYTES else "low"
        amounts = {"gathered_bytes": whole}
        yield finding("root_only", amounts, severity=severity, fqn="", parameters=len(only.parameters))


def _is_gathered_once(group: ParamGroupInfo) -> bool:
    """Whether nothing changes a group that stays gathered: a frozen teacher."""
    return group.reshard_after_forward is False and not any(one.requires_grad for one in group.parameters)


def _large_root(evidence: RunEvidence) -> Iterator[Finding]:
    """Find a root that keeps more than all units below it: it stays gathered through forward and backward."""
    groups = grouped(
        (group.root, group) for group in evidence.first.param_groups if group.shard_world_size > 1
    )
    for members in groups.values():
        rest = [group for group in members if not group.fqn]
        own, whole = (sum(map(_gathered_bytes, some)) for some in (rest, members))
        if len(rest) == len(members) or own < _TINY_BYTES or 2 * own <= whole:
            continue
        modules = summed(
            (one.fqn.rpartition(".")[0], prod(one.padded_local_shape))
            for one in (one for group in rest for one in group.parameters)
        )
        large = [name for name, size in modules.most_common(4) if name and 10 * size >= modules.total()]
        yield finding(
            "root_holds_most",
            {"gathered_bytes": own},
            severity="medium" if own >= _LARGE_BYTES else "low",
            fqn="",
            part=own / whole,
            large=listed(large),
            modules=listed(large) or "its large modules",
        )


def _forgotten_blocks(evidence: RunEvidence) -> Iterator[Finding]:
    """Find numbered blocks that are left in the root while most of their siblings are separate units."""
    wrapped: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    left: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    for group in evidence.first.param_groups:
        for one in group.parameters:
            block = block_of(one.fqn)
            blocks, _, number = block.rpartition(".")
            if blocks and number.isdecimal():  # a Sequential at the root holds layers of all kinds
                size = group.shard_world_size * prod(one.padded_local_shape) * _item(one.dtype)
                (wrapped if group.fqn else left)[group.root, blocks][block] += size
    for (root, blocks), inside in left.items():
        others = wrapped[root, blocks]
        least = min(others.values(), default=0)
        forgotten = [name for name, size in inside.items() if name not in others and 2 * size >= least]
        held = sum(inside[name] for name in forgotten)
        if forgotten and len(forgotten) <= len(others):
            yield finding(
                "blocks_not_wrapped",
                {"blocks": forgotten, "bytes": held},
                severity="medium" if held >= _TINY_BYTES else "low",
                are="is" if len(forgotten) == 1 else "are",
                others=len(others),
                parent=blocks,
            )


def _not_reduced(evidence: RunEvidence) -> Iterator[Finding]:
    """Find trained roots whose gradients were reduced in no captured step, or before the last backward."""
    trained = {group.root for group in evidence.first.param_groups if group.requires_grad}
    for one in evidence.first.roots:
        if one.root not in trained or not one.reshards:
            continue
        if one.gradient_syncs == 0:
            yield finding("gradients_never_reduced", {"root": one.root}, backwards=one.reshards)
        elif one.gradient_syncs and one.unreduced:
            evidence_of = {"root": one.root, "unreduced": one.unreduced}
            yield finding("gradients_reduced_too_early", evidence_of, backwards=one.micro_batches)


def _shards_of_one(evidence: RunEvidence) -> Iterator[Finding]:
    """Find groups that are replicated over several ranks and sharded over one."""
    alone = [
        group
        for group in evidence.first.param_groups
        if group.shard_world_size == 1 and group.replicate_world_size > 1 and group.shard_group is not None
    ]
    if not alone:
        return
    held = sum(map(_gathered_bytes, alone))
    yield finding(
        "sharded_over_one_rank",
        {"ranks": alone[0].replicate_world_size},
        severity="medium" if held >= _LARGE_BYTES else "low",
        mesh=alone[0].mesh.shape,
        groups=len(alone),
        held=held,
    )


def _doubles(evidence: RunEvidence) -> Iterator[Finding]:
    """Find parameters that are gathered and multiplied in double precision."""
    whole = sum(map(_gathered_bytes, evidence.first.param_groups))
    doubles = [
        group
        for group in evidence.first.param_groups
        if any((group.param_dtype or one.dtype) == "float64" for one in group.parameters)
    ]
    held = sum(map(_gathered_bytes, doubles))
    if held and 2 * held > whole:
        yield finding("double_precision", {"bytes": held}, groups=len(doubles))


def _gathered_bytes(group: ParamGroupInfo) -> int:
    """Bytes that all-gathers of a group give."""
    return group.shard_world_size * sum(
        prod(one.padded_local_shape) * _item(group.param_dtype or one.dtype) for one in group.parameters
    )


def _tiny_units(evidence: RunEvidence) -> Iterator[Finding]:
    """Find many units of less than a mebibyte: latency sets the time of each collective."""
    sizes: dict[str, int] = {}
    for group in evidence.first.param_groups:
        if group.fqn and group.shard_world_size > 1:
            sizes[f"{group.root}:{group.fqn}"] = _gathered_bytes(group)
    tiny = {name: size for name, size in sizes.items() if size < _TINY_BYTES}
    if len(tiny) < _MANY_UNITS or 2 * len(tiny) <= len(sizes):
        return
    mean = sum(tiny.values()) // len(tiny)
    yield finding("wrapping_too_fine", {"units": len(tiny), "mean_bytes": mean})


def _blocks_without_root(evidence: RunEvidence) -> set[int]:
    """Equal roots beside trained parameters outside every group: blocks of one model, not models."""
    if not any(one.kind == "optimizer" and one.has_gradient for one in evidence.first.unsharded or ()):
        return set()
    alike: dict[tuple[tuple[str, tuple[int, ...]], ...], set[int]] = defaultdict(set)
    for group in evidence.first.param_groups:
        shapes = tuple((one.fqn, tuple(one.global_shape)) for one in group.parameters)
        alike[shapes].add(group.root)
    return {root for roots in alike.values() if len(roots) > 1 for root in roots}


def _outside(evidence: RunEvidence) -> Iterator[Finding]:
    """Parameters outside every group: whole on every rank, their gradients never reduced."""
    told = [one for one in evidence.first.unsharded or () if one.kind == "parameter"]
    trained = [one for one in told if one.requires_grad]
    frozen = [one for one in told if not one.requires_grad]
    yield from _unreduced(evidence, trained, "unreduced_parameters")
    if frozen:
        size = sum(one.nbytes for one in frozen)
        yield finding(
            "unsharded_frozen",
            {"bytes": size},
            severity="medium" if size >= _LARGE_BYTES else "info",
            parameters=len(frozen),
            names=[one.fqn for one in frozen],
        )


def _optimizer(evidence: RunEvidence) -> Iterator[Finding]:
    """The optimizers hold the parameters that FSDP shards."""
    stray = [one for one in evidence.first.unsharded or () if one.kind == "optimizer"]
    trained = [one for _, one in evidence.first_parameters if one.requires_grad]
    left_out = [one for one in trained if one.optimized is False]
    dead = [one for one in stray if not one.has_gradient]
    if dead and left_out:
        names = [one.fqn for one in left_out]
        count = {"parameters": len(left_out)}
        yield finding("optimizer_before_fully_shard", count, dead=len(dead), names=names)
    elif left_out:
        names = [one.fqn for one in left_out]
        yield finding("not_optimized", {"parameters": len(left_out)}, names=names)
    alive = [one for one in stray if one.has_gradient]
    yield from _unreduced(evidence, alive, "unreduced_parameters/in_optimizer")


def _unreduced(evidence: RunEvidence, whole: Sequence[UnshardedInfo], key: str) -> Iterator[Finding]:
    """Find gradients that neither FSDP nor the script reduces."""
    severity = _unreduced_severity(evidence, whole)
    if severity is not None:
        yield finding(
            key,
            {"bytes": sum(one.nbytes for one in whole)},
            severity=severity,
            parameters=len(whole),
            names=[one.fqn for one in whole],
            unless=_unless(evidence, severity),
        )


def _unreduced_severity(evidence: RunEvidence, whole: Sequence[UnshardedInfo]) -> Severity | None:
    """Severity of gradients that FSDP does not reduce; None where somebody else does.

    The script does if every traced step has an all-reduce of its own for each of these gradients, or one for
    all. All-reduces that are large enough in sum may carry them in other parts: nothing is certain then.
    """
    if not whole or evidence.world_size < 2:
        return None
    if evidence.info.wrappers:
        return "medium"
    own = evidence.own_collectives
    if own is None or not own.all_reduces:
        return "medium"
    steps = own.all_reduces
    sizes = Counter(prod(one.shape) for one in whole)
    total = sum(sizes.elements())
    if all(not sizes - Counter(step) or total in step for step in steps):
        return None
    if own.exchanges:
        return "info"
    return "medium" if all(sum(step) >= total for step in steps) else "high"


def _unless(evidence: RunEvidence, severity: Severity) -> str:
    """Name other code that may reduce gradients: a wrapper in addition to ``fully_shard``, or the script."""
    if severity == "high":
        return ": the recording has no all-reduce for them"
    if evidence.info.wrappers:
        return f", unless {listed(evidence.info.wrappers)} reduces them"
    if severity == "info":
        return ", unless every rank has its own experts, as the recording's all-to-alls suggest"
    if evidence.own_collectives is None or not evidence.own_collectives.all_reduces:
        shown = "which a trace would show (record with --active 1 or more)"
        return f", unless the script reduces them, {shown}, or every rank has its own experts"
    return ", unless the script's own all-reduces include them"


def _without_gradient(evidence: RunEvidence) -> Iterator[Finding]:
    """Trainable parameters that had no gradient in any reduction of the captured steps."""
    sizes: dict[str, int] = {}
    for group in evidence.first.param_groups:
        trained = sum(prod(one.padded_local_shape) for one in group.parameters if one.requires_grad)
        if group.requires_grad and group.reductions and group.distinct_numel is not None:
            missing = trained - group.distinct_numel
            if missing > 0:
                name = group.fqn or "the root module"
                sizes[name] = sizes.get(name, 0) + missing * group.shard_world_size
    if sizes:
        yield finding("parameters_without_gradient", {"elements": sum(sizes.values())}, names=[*sizes])


def _same_inputs(evidence: RunEvidence) -> Iterator[Finding]:
    """Find ranks that get the same data though FSDP averages their gradients.

    A batch that is used again and again is a test of the program, and says nothing; neither do ranks of
    another parallelism, which belong to a process group beside FSDP's.
    """
    alike: dict[tuple[tuple[str | None, ...], ...], list[int]] = defaultdict(list)
    for rank, manifest in evidence.sharded.items():
        frozen = frozen_roots(manifest)
        seen = tuple(tuple(one) for root, one in enumerate(manifest.inputs) if one and root not in frozen)
        if seen and all(len({*root} - {None}) > 1 for root in seen):
            alike[seen].append(rank)
    found = [ranks for ranks in alike.values() if len(ranks) > 1 and not _in_another_group(evidence, ranks)]
    if same := [*filter(None, (_averaged(evidence, ranks) for ranks in found))]:
        sets = [f"ranks {listed(ranks)}" for ranks in same]
        ranks = [rank for ranks in same for rank in ranks]
        yield finding("same_inputs", {"ranks": ranks}, sets="; ".join(sets))


def _averaged(evidence: RunEvidence, ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks`` whose gradients FSDP averages with another one of them."""
    return [
        rank
        for rank in ranks
        if any(len(reduced & {*ranks}) > 1 for reduced in _reduced_by_root(evidence, rank).values())
    ]


def _in_another_group(evidence: RunEvidence, ranks: Sequence[int]) -> bool:
    """Whether a process group that is neither FSDP's nor that of all ranks has several of some ranks."""
    for rank in ranks:
        manifest = evidence.sharded[rank]
        own = {
            name
            for group in manifest.param_groups
            for name in (
                group.shard_group,
                group.reduce_scatter_group,
                group.all_reduce_group,
                group.post_forward_group,
            )
        }
        for one in manifest.process_groups:
            beside = one.name not in own and len(one.ranks) < evidence.world_size
            if beside and len({*one.ranks} & {*ranks}) > 1:
                return True
    return False


def _learning_rates(evidence: RunEvidence) -> Iterator[Finding]:
    """Find ranks that update shards of one model with different learning rates after the same steps.

    The order of optimizers means nothing, so the sorted rates of all groups are compared.
    """
    compared: set[int] = set()
    for rank, first in evidence.sharded.items():
        if rank in compared:
            continue
        joined = set().union(*_reduced_by_root(evidence, rank).values()) & evidence.sharded.keys()
        compared |= joined
        alike: dict[tuple[float, ...], list[int]] = defaultdict(list)
        for other in sorted(joined):
            manifest = evidence.sharded[other]
            if _captured(manifest) == _captured(first):
                rates = [rate for one in manifest.optimizers for rate in one.learning_rates]
                alike[tuple(sorted(rate for rate in rates if rate is not None))].append(other)
        if len({*map(len, alike)}) == 1:
            unlike = next(
                (at for at, rates in enumerate(zip(*alike, strict=True)) if len({*rates}) > 1), None
            )
            if unlike is not None:
                sets = [f"{rates[unlike]} on {numbered('rank', ranks)}" for rates, ranks in alike.items()]
                yield finding("learning_rates_differ", sets=", ".join(sets))


def _captured(manifest: RankManifest) -> list[tuple[int, str]]:
    return [(one.step, one.kind) for one in manifest.steps if one.kind != "plain"]


def _half_states(evidence: RunEvidence) -> Iterator[Finding]:
    for optimizer in evidence.first.optimizers:
        half = {name: size for name, size in optimizer.state_dtypes.items() if name in _HALF and size}
        if "adam" not in optimizer.class_name.lower() or not half:
            continue
        facts = {"states": half}
        yield finding("half_precision_states", facts, optimizer=optimizer.class_name, dtype=next(iter(half)))


def _unreduced_dimension(evidence: RunEvidence) -> Iterator[Finding]:
    """A mesh dimension whose ranks see different data, and over which FSDP does not reduce."""
    said: set[tuple[int, str]] = set()
    for rank, manifest in evidence.sharded.items():
        for root, reduced in _reduced_by_root(evidence, rank).items():
            for other in manifest.process_groups:
                name = other.mesh_dim or other.desc.removeprefix("mesh_")
                left = [one for one in other.ranks if one not in reduced]
                is_data = name.startswith(_DATA_DIMENSIONS) and rank in other.ranks
                if not is_data or not left or (root, name) in said:
                    continue
                said.add((root, name))
                facts: dict[str, EvidenceValue] = {"dimension": name, "root": root}
                yield finding("unreduced_dimension", facts, reduced=len(reduced), rank=rank, others=left)


def _reduced_by_root(evidence: RunEvidence, rank: int) -> dict[int, set[int]]:
    """Root -> ranks whose gradients end in this rank's shards: of its shard groups and of their replicas."""
    reduced: dict[int, set[int]] = defaultdict(set)
    for position, group in enumerate(evidence.sharded[rank].param_groups):
        if not group.requires_grad:
            continue
        replicas = evidence.process_group(rank, group.all_reduce_group)
        for each in replicas.ranks if replicas is not None else [rank]:
            theirs = evidence.sharded.get(each)
            if theirs is None or position >= len(theirs.param_groups):
                reduced[group.root].add(each)
                continue
            shards = evidence.process_group(each, theirs.param_groups[position].shard_group)
            reduced[group.root] |= {each} if shards is None else set(shards.ranks)
    return reduced


def _devices(evidence: RunEvidence) -> Iterator[Finding]:
    """Ranks of one host have a device each, the one of their local rank."""
    by_device: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    odd: list[int] = []
    for rank, manifest in evidence.manifests.items():
        if (key := manifest.device_key) is None:
            continue
        by_device[key].append(rank)
        seen = manifest.environment.get("CUDA_VISIBLE_DEVICES", "")
        if manifest.device.index != manifest.local_rank and not seen:
            odd.append(rank)
    shared = sorted(sorted(ranks) for ranks in by_device.values() if len(ranks) > 1)
    for ranks in shared:
        first = evidence.manifests[ranks[0]]
        yield finding("shared_device", {"ranks": ranks}, index=first.device.index, host=first.host)
    one_each = all(one.device.uuid and not one.device.index for one in evidence.manifests.values())
    if odd and not shared and not one_each:
        yield finding("device_of_another_rank", {"ranks": sorted(odd)})


def _adapters(evidence: RunEvidence) -> Iterator[Finding]:
    """A frozen base that is kept in fp32 although it computes in half precision."""
    roots = grouped((group.root, (group, parameter)) for group, parameter in evidence.first_parameters)
    for members in roots.values():
        frozen = [
            one
            for group, one in members
            if not one.requires_grad and one.dtype == "float32" and group.param_dtype in _HALF
        ]
        numel = sum(prod(one.global_shape) for _, one in members)
        base = sum(prod(one.global_shape) for one in frozen)
        if not numel or base < _FROZEN_FRAC * numel or base == numel:
            continue
        held = 4 * sum(prod(one.padded_local_shape) for one in frozen)
        yield finding(
            "frozen_in_fp32",
            {"saves_bytes": held // 2},
            severity="medium" if held >= _LARGE_BYTES else "low",
            part=base / numel,
            held=held,
        )


def _integer_reshard(evidence: RunEvidence) -> Iterator[Finding]:
    """Resharding to fewer ranks helps where they are on one node and the shard group is not."""
    for group in evidence.first.param_groups:
        if isinstance(group.reshard_after_forward, bool):
            continue
        rank = next(iter(evidence.sharded))
        whole = evidence.process_group(rank, group.shard_group)
        part = evidence.process_group(rank, group.post_forward_group)
        if whole is None or part is None:
            continue
        before, after = evidence.nodes(whole.ranks), evidence.nodes(part.ranks)
        if before is None or after is None or after < before:
            continue
        size = group.reshard_after_forward
        where = "is already on one node" if before == 1 else f"still crosses {after} nodes"
        yield finding(
            "reshard_cannot_help",
            {"reshard_after_forward": size},
            fqn=group.fqn,
            size=size if before > 1 else len(whole.ranks),
            ranks=len(whole.ranks),
            where=where,
        )
        return


def _several_roots(evidence: RunEvidence) -> Iterator[Finding]:
    """Trained roots with their own streams; a frozen one (a teacher) runs before or after, not in
    parallel."""
    trained = {group.root for group in evidence.first.param_groups if group.requires_grad}
    contexts: dict[int, set[int]] = defaultdict(set)
    for group in evidence.first.param_groups:
        if group.shard_world_size > 1 and group.root in trained:
            contexts[group.comm_context].add(group.root)
    roots = {root for members in contexts.values() for root in members}
    if min(len(roots), len(contexts)) > 1:
        yield finding("streams_not_shared", {"roots": len(roots)}, contexts=len(contexts))


def _item(dtype: str) -> int:
    return dtype_bytes(dtype) or 0


_RULES: Sequence[Callable[[RunEvidence], Iterator[Finding]]] = (
    _wrappers,
    _root_only,
    _large_root,
    _forgotten_blocks,
    _tiny_units,
    _outside,
    _optimizer,
    _not_reduced,
    _without_gradient,
    _same_inputs,
    _learning_rates,
    _half_states,
    _unreduced_dimension,
    _shards_of_one,
    _devices,
    find_in_variables,
    _doubles,
    _adapters,
    _integer_reshard,
    _several_roots,
)
