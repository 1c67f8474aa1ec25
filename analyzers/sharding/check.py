"""A recorded run, checked: structure, known mistakes, what is left unsharded.

Is every parameter sharded as its mesh says? Ranks against each other, shards against the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from fsdp2prof.analyzers.findings import listed
from fsdp2prof.analyzers.sharding.layout import chunk_rows, rows_of_shard
from fsdp2prof.analyzers.sharding.mistakes import find_mistakes
from fsdp2prof.analyzers.sharding.recorded import RecordedGroup, group_key, shard_dim
from fsdp2prof.analyzers.sharding.run_evidence import (
    Outcome,
    OwnCollectives,
    RunEvidence,
    failed,
    finding,
    ok,
    unknown,
)
from fsdp2prof.by_key import grouped
from fsdp2prof.manifest import ParameterInfo, RankManifest
from fsdp2prof.results.check import CheckRow, RunCheck, UnshardedRow
from fsdp2prof.results.finding import SEVERITIES, Finding
from fsdp2prof.run_directory import RunDirectory
from fsdp2prof.units import format_bytes, plural
from fsdp2prof.vocabulary import layer_name, quoted_error


def check_structure(evidence: RunEvidence) -> tuple[list[CheckRow], list[Finding]]:
    """Return the checks that were made and the findings."""
    outcomes = [check(evidence) for check in _CHECKS]
    return [row for row, _ in outcomes], [found for _, found in outcomes if found is not None]


def _ranks(evidence: RunEvidence) -> Outcome:
    """Every rank described its sharding."""
    missing = [rank for rank in range(evidence.world_size) if rank not in evidence.sharded]
    left_out = [
        rank for rank in missing if rank in evidence.manifests and not evidence.manifests[rank].selected
    ]
    name, world = "ranks", evidence.world_size
    if not evidence.sharded and len(left_out) < max(1, len(missing)):
        ended = next((one.error for one in evidence.manifests.values() if one.error), None)
        why = (
            f"they ended with {quoted_error(ended).removesuffix('.')}"
            if ended
            else "the script does not call fully_shard, or nothing ran"
        )
        return failed(name, world, finding("nothing_sharded", {"ranks": []}, why=why))
    if not missing:
        return ok(name, world, f"all {plural(world, 'rank')} described their parameter groups")
    if len(left_out) == len(missing):
        said = f"{plural(len(missing), 'rank')} left out by --ranks: {listed(missing)}"
        return unknown(name, said, world)
    return failed(
        name, world, finding("ranks_missing", {"ranks": missing}, missing=len(missing), world=world)
    )


def _same_groups(evidence: RunEvidence) -> Outcome:
    """All ranks have the same groups, in the same order, with the same parameters."""
    ways = grouped(
        (
            tuple(
                (group_key(group), tuple((one.fqn, tuple(one.global_shape)) for one in group.parameters))
                for group in manifest.param_groups
            ),
            rank,
        )
        for rank, manifest in evidence.sharded.items()
    )
    name = "groups"
    if len(ways) <= 1:
        count = len(evidence.first.param_groups)
        return ok(name, len(evidence.sharded), f"all ranks have the same {plural(count, 'group')} in order")
    if any("pp" in (one.desc.removeprefix("mesh_"), one.mesh_dim) for one in evidence.first.process_groups):
        return unknown(name, f"{len(ways)} sets of groups, as with pipeline stages", len(evidence.sharded))
    expected = max(ways.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    odd = sorted(rank for ranks in ways.values() if ranks is not expected for rank in ranks)
    difference = _first_difference(evidence, expected[0], odd[0])
    found = finding("groups_differ", {"ranks": odd}, expected=expected[0], difference=difference)
    return failed(name, len(evidence.sharded), found)


def _first_difference(evidence: RunEvidence, rank: int, other: int) -> str:
    ours, theirs = (
        [
            (group_key(group), [one.fqn for one in group.parameters])
            for group in evidence.sharded[each].param_groups
        ]
        for each in (rank, other)
    )
    for (mine, _), (its, names) in zip(ours, theirs, strict=False):
        if (its, names) not in ours or mine != its:
            said = f"group `{layer_name(its[1])}` of {plural(len(names), 'parameter')}"
            return f"{said} instead of `{layer_name(mine[1])}`"
    return f"{plural(len(theirs), 'group')} instead of {len(ours)}, or different shapes"


def _process_groups(evidence: RunEvidence) -> Outcome:
    """All members of a shard group name the same ranks in the same order, themselves among them."""
    wrong: list[str] = []
    checked = 0
    for group in evidence.groups:
        members: dict[int, tuple[int, ...]] = {}
        for rank, info in group.by_rank.items():
            known = evidence.process_group(rank, info.shard_group)
            if known is not None:
                members[rank] = tuple(known.ranks)
        checked += len(members)
        for rank, ranks in members.items():
            others = [other for other in ranks if members.get(other, ranks) != ranks]
            if rank not in ranks or others:
                wrong.append(f"{group.first.fqn or '(root)'} on rank {rank}")
    if not wrong:
        return ok(
            "process groups", checked, "all ranks of a sharding group list the same ranks in the same order"
        )
    return failed("process groups", checked, finding("shard_groups_differ", wrong=wrong))


def _shards(evidence: RunEvidence) -> Outcome:
    """Each rank's rows are those of its chunk, short and empty chunks included."""
    wrong: list[str] = []
    ranks: set[int] = set()
    checked = uneven = 0
    for group, position, parameter, size in _parameters(evidence):
        dim = shard_dim(parameter)
        for members in group.shard_groups:
            uneven += bool(size % len(members))
            for shard, rank in enumerate(members):
                told = group.parameter(rank, position)
                if told is None:
                    continue
                checked += 1
                rows = rows_of_shard(size, len(members), shard)[1]
                padded = told.padded_local_shape[dim] if dim < len(told.padded_local_shape) else -1
                held = told.local_shape[dim] if dim < len(told.local_shape) else -1
                if held != rows or padded != chunk_rows(size, len(members)):
                    wrong.append(f"{parameter.fqn} on rank {rank}: {held} rows, {rows} expected")
                    ranks.add(rank)
    if not wrong:
        said = "every shard matches its rank's position in the mesh"
        said += f"; {plural(uneven, 'parameter')} of uneven size" if uneven else ""
        return ok("shards", checked, said)
    found = finding("wrong_shards", {"ranks": sorted(ranks)}, shards=len(wrong), wrong=wrong)
    return failed("shards", checked, found)


def _coverage(evidence: RunEvidence) -> Outcome:
    """Over all ranks, the shards of a parameter make a whole number of copies: no gap, no overlap."""
    wrong: list[str] = []
    checked = left = 0
    for group in evidence.groups:
        everyone = {rank for members in group.shard_groups for rank in members}
        if not everyone <= group.by_rank.keys():
            left += len(group.first.parameters)
            continue
        for position, parameter in enumerate(group.first.parameters):
            told = [one for rank in group.by_rank if (one := group.parameter(rank, position)) is not None]
            if len(told) < len(group.by_rank):  # said where groups are compared
                continue
            held = sum(prod(one.local_shape) for one in told)
            whole = prod(parameter.global_shape)
            copies = len(group.shard_groups) if parameter.tensor_parallel is None else None
            checked += 1
            if (held != copies * whole) if copies is not None else (whole and held % whole):
                wrong.append(f"{parameter.fqn}: {held:,} of {whole:,} elements")
    if wrong:
        found = finding("shards_do_not_add_up", parameters=len(wrong), wrong=wrong)
        return failed("coverage", checked, found)
    if left:
        said = f"{plural(left, 'parameter')} not checked: some of their ranks have no manifest"
        return unknown("coverage", said, checked)
    return ok("coverage", checked, "local shards add up to the global tensors, without gap or overlap")


def _replicas(evidence: RunEvidence) -> Outcome:
    """Ranks that hold the same shard hold the same values, and the same gradient."""
    pairs = {"checksum": "values", "gradient_checksum": "gradients"}
    wrong: dict[str, list[str]] = defaultdict(list)
    checked = 0
    for group in evidence.groups:
        for ranks in _replica_sets(group):
            for position, parameter in enumerate(group.first.parameters):
                told = [group.parameter(rank, position) for rank in ranks]
                for attribute, what in pairs.items():
                    sums = {getattr(one, attribute) for one in told if one is not None} - {None}
                    checked += bool(sums)
                    if len(sums) > 1:
                        wrong[what].append(f"{parameter.fqn} on ranks {listed(ranks)}")
    if not any(group.first.replicate_world_size > 1 for group in evidence.groups):
        return ok("replicas", 0, "no shard is replicated")
    if not checked:
        return unknown("replicas", "unknown: the recording has no checksums of replicas")
    if not wrong:
        parameters = [one for group in evidence.groups for one in group.first.parameters]
        sampled = any(one.checksum is None for one in parameters)
        said = "replicas hold the same values and gradients after the first step"
        return ok("replicas", checked, f"{said}; a sample, --verify compares all" if sampled else said)
    what = "gradients" if wrong["gradients"] else "values"
    key = "replicas_differ/gradients" if wrong["gradients"] else "replicas_differ"
    found = finding(key, {"parameters": len(wrong[what])}, wrong=wrong[what])
    return failed("replicas", checked, found)


def _replica_sets(group: RecordedGroup) -> Iterator[list[int]]:
    """Ranks that hold the same shard of every parameter; under tensor parallelism they are unknown."""
    if group.first.replicate_world_size < 2 or any(
        one.tensor_parallel is not None for one in group.first.parameters
    ):
        return
    shards = len(group.shard_groups[0])
    for shard in range(shards):
        yield [members[shard] for members in group.shard_groups if len(members) == shards]


def _versions(evidence: RunEvidence) -> Outcome:
    """All ranks run the same Python, torch, CUDA and NCCL."""
    differing: list[str] = []
    facts: dict[str, str] = {}
    names = sorted({name for manifest in evidence.manifests.values() for name in manifest.versions})
    for name in names:
        by_version = grouped(
            (manifest.versions.get(name, "none"), rank)
            for rank, manifest in sorted(evidence.manifests.items())
        )
        if len(by_version) > 1:
            text = "; ".join(f"{version} on ranks {listed(ranks)}" for version, ranks in by_version.items())
            differing.append(f"{name} {text}")
            facts[name] = text
    if not differing:
        return ok("versions", len(evidence.manifests), f"the same {listed(names)} on every rank")
    found = finding("versions_differ", {"versions": facts}, what=". ".join(differing))
    return failed("versions", len(evidence.manifests), found)


def _parameters(evidence: RunEvidence) -> Iterator[tuple[RecordedGroup, int, ParameterInfo, int]]:
    """Every parameter with its rows; under tensor parallelism they are the parts that the ranks of a group
    hold."""
    for group in evidence.groups:
        for position, parameter in enumerate(group.first.parameters):
            dim = shard_dim(parameter)
            if parameter.tensor_parallel is None:
                yield group, position, parameter, parameter.global_shape[dim]
                continue
            for members in group.shard_groups:
                told = [group.parameter(rank, position) for rank in members]
                held = [one.local_shape[dim] for one in told if one is not None]
                if len(held) == len(members):
                    alone = RecordedGroup(key=group.key, by_rank=group.by_rank, shard_groups=(members,))
                    yield alone, position, parameter, sum(held)


_CHECKS: tuple[Callable[[RunEvidence], Outcome], ...] = (
    _ranks,
    _same_groups,
    _process_groups,
    _shards,
    _coverage,
    _replicas,
    _versions,
)


def check_run(
    run: RunDirectory,
    manifests: Mapping[int, RankManifest],
    own_collectives: Callable[[], OwnCollectives | None] = lambda: None,
) -> RunCheck:
    """Check how a run was sharded, from the manifests of all its ranks.

    ``own_collectives`` returns those that no FSDP module issued; None without a trace. It is called only
    if gradients may depend on them.
    """
    evidence = RunEvidence(run.info, manifests, own_collectives)
    checks, broken = check_structure(evidence)
    findings = [*broken, *find_mistakes(evidence)]
    if evidence.info.wrappers and not evidence.sharded:  # said with the name of what wraps instead
        findings = [one for one in findings if one.id != "nothing_sharded"]
    findings.sort(key=lambda one: SEVERITIES.index(one.severity))
    unsharded = _unsharded(evidence)
    return RunCheck(
        passed=not any(one.severity == "high" for one in findings),
        verdict=_verdict(evidence, checks, findings, unsharded),
        world_size=evidence.world_size,
        ranks=list(evidence.sharded),
        checks=[*checks, _unsharded_check(evidence, unsharded)],
        findings=findings,
        unsharded=unsharded,
        warnings=list(run.messages),
    )


def _unsharded(evidence: RunEvidence) -> list[UnshardedRow]:
    shards = max((group.shard_world_size for group in evidence.first.param_groups), default=1)
    return [
        UnshardedRow(
            kind=one.kind,
            root=one.root,
            fqn=one.fqn,
            dtype=one.dtype,
            shape=one.shape,
            bytes=one.nbytes,
            excess_bytes=one.nbytes - one.nbytes // shards,
            requires_grad=one.requires_grad,
        )
        for one in evidence.first.unsharded or ()
    ]


def _unsharded_check(evidence: RunEvidence, unsharded: Sequence[UnshardedRow]) -> CheckRow:
    if evidence.first.unsharded is None:
        has_stepped = any(one.steps for one in evidence.manifests.values())
        said = (
            "the run was recorded by an older version" if has_stepped else "no rank finished its first step"
        )
        return unknown("unsharded", f"unknown: {said}")[0]
    size, excess = sum(one.bytes for one in unsharded), sum(one.excess_bytes for one in unsharded)
    said = "every parameter is in a group"
    if unsharded:
        tensors = plural(len(unsharded), "tensor")
        said = (
            f"{tensors} whole on every rank: {format_bytes(size)}, {format_bytes(excess)} more than sharded"
        )
    return CheckRow(name="unsharded", state="ok", checked=len(unsharded), said=said)


def _verdict(
    evidence: RunEvidence,
    checks: Sequence[CheckRow],
    findings: Sequence[Finding],
    unsharded: Sequence[UnshardedRow],
) -> list[str]:
    grave = [one for one in findings if one.severity == "high"]
    parameters = len(evidence.first_parameters)
    ranks = plural(len(evidence.sharded), "rank")
    if grave:
        head = f"Sharding is wrong: {plural(len(grave), 'finding')} of high severity, {len(findings)} in all."
    else:
        groups = evidence.first.param_groups
        whole = len(evidence.sharded) > 1 and all(one.shard_world_size < 2 for one in groups)
        does = "replicated" if groups and whole else "sharded"
        are = "is" if parameters == 1 else "are"
        head = f"{plural(parameters, 'parameter')} {are} {does} over {ranks} as their meshes define."
        if findings:
            head += f" {plural(len(findings), 'finding')} to check."
    unchecked = [row.name for row in checks if row.state == "unknown"]
    said = [head]
    if unchecked:
        said.append(f"Could not be checked: {', '.join(unchecked)}.")
    if unsharded:
        size = sum(one.excess_bytes for one in unsharded)
        said.append(
            f"Unsharded tensors take {format_bytes(size)} more on every rank than if they were sharded."
        )
    return said
