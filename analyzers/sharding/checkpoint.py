"""A distributed checkpoint: whether its pieces form whole tensors, its files are present, and a model fits
it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod

from fsdp2prof.by_key import grouped
from fsdp2prof.results.sharding import (
    CheckpointEntry,
    CheckpointFile,
    CheckpointMap,
    CheckpointMismatch,
    CheckpointModel,
)
from fsdp2prof.tables.sharding import CheckpointTable, ShardingTable, StoredChunk, StoredTensor
from fsdp2prof.units import dtype_bytes, format_bytes, plural

_OPTIMIZER_WORDS = frozenset({"optim", "optimizer", "optimizers", "state", "param_groups"})
"""Parts of an entry's name that say it belongs to an optimizer."""
_MOST_CUT = 8
"""Dimensions along which one tensor is cut: each mesh dimension cuts one."""


def map_checkpoint(table: CheckpointTable, model: ShardingTable | None = None) -> CheckpointMap:
    """Describe a checkpoint's content; with a model also the parts that it lacks for it."""
    entries = [_entry(one) for one in table.entries]
    files = _files(table)
    compared = None if model is None else _against(table.entries, model)
    tensor_bytes = sum(entry.bytes or 0 for entry in entries)
    return CheckpointMap(
        verdict=_verdict(entries, files, compared, tensor_bytes),
        path=table.path,
        version=table.version,
        bytes=sum(table.files.values()),
        tensor_bytes=tensor_bytes,
        entries=entries,
        files=files,
        model=compared,
        warnings=_warnings(entries, files),
    )


def _entry(one: StoredTensor) -> CheckpointEntry:
    size = None if one.dtype is None else dtype_bytes(one.dtype)
    return CheckpointEntry(
        name=one.name,
        shape=None if one.shape is None else list(one.shape),
        dtype=one.dtype,
        bytes=None if size is None else one.numel * size,
        stored_bytes=sum(chunk.length for chunk in one.chunks),
        pieces=len(one.chunks),
        files=len({chunk.file for chunk in one.chunks if chunk.file is not None}),
        covered=None if one.shape is None else _covers(one.shape, one.chunks),
    )


def _covers(shape: Sequence[int], chunks: Sequence[StoredChunk]) -> bool | None:
    """Whether boxes fill a tensor without gap or overlap; None where they are cut along too many dimensions.

    A corner of a box turns on or off, modulo 2, how often what lies beyond it is covered. If only the corners
    of the whole are left when those that meet have cancelled out, every element is covered an odd number of
    times, none outside; with as many elements in the boxes as in the whole that number is one.
    """
    if any(len(shape) != len(chunk.offsets) or len(shape) != len(chunk.sizes) for chunk in chunks):
        return False
    boxes = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if sum(prod(chunk.sizes) for chunk in boxes) != prod(shape):
        return False
    cut = [axis for axis in range(len(shape)) if any(chunk.sizes[axis] != shape[axis] for chunk in boxes)]
    if len(cut) > _MOST_CUT:
        return None
    whole = StoredChunk(offsets=(0,) * len(shape), sizes=tuple(shape), file=None, offset=0, length=0)
    corners: set[tuple[int, ...]] = set()
    for box in (*boxes, *([whole] if boxes else [])):
        if any(box.offsets[axis] for axis in range(len(shape)) if axis not in cut):
            return False
        ends = [(box.offsets[axis], box.offsets[axis] + box.sizes[axis]) for axis in cut]
        corners.symmetric_difference_update(product(*ends))
    return not corners


def _files(table: CheckpointTable) -> list[CheckpointFile]:
    chunks: dict[str, list[StoredChunk]] = defaultdict(list)
    for entry in table.entries:
        for chunk in entry.chunks:
            if chunk.file is not None:
                chunks[chunk.file].append(chunk)
    return [_file(name, table.files.get(name), chunks[name]) for name in sorted({*chunks, *table.files})]


def _file(name: str, size: int | None, chunks: Sequence[StoredChunk]) -> CheckpointFile:
    needed = max((chunk.offset + chunk.length for chunk in chunks), default=0)
    if size is None:
        state = "missing"
    else:
        state = "unused" if not chunks else "truncated" if size < needed else "whole"
    return CheckpointFile(
        name=name,
        bytes=size,
        used_bytes=sum(chunk.length for chunk in chunks),
        needed_bytes=needed,
        entries=len(chunks),
        state=state,
    )


def _against(entries: Sequence[StoredTensor], model: ShardingTable) -> CheckpointModel:
    """Compare tensors by name, under the prefix that most of the model's names have in the checkpoint."""
    stored = {entry.name: entry for entry in entries if entry.shape is not None}
    expected = {one.fqn: one for one in model.parameters}
    weights = {
        name: entry
        for name, entry in stored.items()
        if name in expected or _OPTIMIZER_WORDS.isdisjoint(name.split("."))
    }
    prefix = _prefix(weights, expected)
    mismatches: list[CheckpointMismatch] = []
    for fqn, one in expected.items():
        entry = weights.get(prefix + fqn)
        said = f"{list(one.global_shape)} {one.dtype}"
        if entry is None:
            mismatches.append(CheckpointMismatch(name=fqn, kind="missing", stored=None, expected=said))
            continue
        found = f"{list(entry.shape or ())} {entry.dtype}"
        if entry.shape != one.global_shape:
            mismatches.append(CheckpointMismatch(name=fqn, kind="shape", stored=found, expected=said))
        elif entry.dtype != one.dtype:
            mismatches.append(CheckpointMismatch(name=fqn, kind="dtype", stored=found, expected=said))
    wanted = {prefix + fqn for fqn in expected}
    for name in weights:
        if name.startswith(prefix) and name not in wanted:
            found = f"{list(weights[name].shape or ())} {weights[name].dtype}"
            mismatches.append(CheckpointMismatch(name=name, kind="unexpected", stored=found, expected=None))
    wrong = sum(one.kind != "unexpected" for one in mismatches)
    return CheckpointModel(
        model=model.source,
        prefix=prefix,
        parameters=len(expected),
        matched=len(expected) - wrong,
        with_optimizer_state=_with_state(stored, expected),
        mismatches=mismatches,
    )


def _prefix(stored: Iterable[str], expected: Iterable[str]) -> str:
    """The commonest text before a parameter's name."""
    by_last = grouped((name.rpartition(".")[2], name) for name in stored)
    found = Counter(
        name[: len(name) - len(fqn)]
        for fqn in expected
        for name in by_last.get(fqn.rpartition(".")[2], ())
        if name == fqn or name.endswith(f".{fqn}")
    )
    return min(found, key=lambda prefix: (-found[prefix], len(prefix))) if found else ""


def _with_state(stored: Iterable[str], expected: Iterable[str]) -> int:
    """Parameters named in an optimizer's entry: ``optim.state.FQN.exp_avg``."""
    owners: set[str] = set()
    for name in stored:
        parts = name.split(".")
        if _OPTIMIZER_WORDS.isdisjoint(parts):
            continue
        owners.update(".".join(parts[start:-1]) for start in range(1, len(parts) - 1))
    return sum(fqn in owners for fqn in expected)


def _verdict(
    entries: Sequence[CheckpointEntry],
    files: Sequence[CheckpointFile],
    model: CheckpointModel | None,
    tensor_bytes: int,
) -> list[str]:
    tensors = [entry for entry in entries if entry.shape is not None]
    bad = [entry for entry in tensors if entry.covered is False]
    broken = [file for file in files if file.state in ("missing", "truncated")]
    said = [
        f"{plural(len(tensors), 'tensor')}, {format_bytes(tensor_bytes)}, in "
        f"{plural(sum(file.state == 'whole' for file in files), 'whole file')}."
    ]
    if bad or broken:
        parts = [f"{plural(len(broken), 'file')} missing or truncated"] if broken else []
        parts += [f"{plural(len(bad), 'tensor')} with gaps or overlaps"] if bad else []
        said.append(f"It cannot be loaded completely: {' and '.join(parts)}.")
    if model is not None:
        kinds = Counter(one.kind for one in model.mismatches)
        fits = f"It contains {model.matched} of {plural(model.parameters, 'parameter')} of {model.model}"
        differ = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        said.append(f"{fits}{f' ({differ})' if differ else ''}.")
    return said


def _warnings(entries: Sequence[CheckpointEntry], files: Sequence[CheckpointFile]) -> list[str]:
    said = []
    for file in files:
        if file.state == "missing":
            said.append(f"{file.name} is missing: {plural(file.entries, 'chunk')} cannot be loaded.")
        if file.state == "truncated":
            said.append(
                f"{file.name} is truncated: it has {file.bytes:,} of at least {file.needed_bytes:,} bytes."
            )
    gaps = [entry.name for entry in entries if entry.covered is False]
    if gaps:
        more = f" and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        said.append(f"The chunks of {gaps[0]}{more} do not cover the tensor exactly.")
    return said
