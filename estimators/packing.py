"""Padding waste of a data set: documents of known lengths as sequences of one length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fsdp2prof.errors import ModelError
from fsdp2prof.results.estimate import PackingEstimate, PackingMethod
from fsdp2prof.units import format_count, format_frac


def estimate_packing(lengths: Sequence[int], *, seq_len: int, batch_size: int) -> PackingEstimate:
    """Count tokens and attention for documents of ``lengths`` tokens, in the order they are read.

    Raises ``ModelError`` without documents, or for a length or size below 1.
    """
    if seq_len < 1 or batch_size < 1:
        raise ModelError("packing: seq_len and batch_size must be at least 1")
    if not lengths:
        raise ModelError("packing: no documents")
    if min(lengths) < 1:
        raise ModelError(f"packing: a document of {min(lengths)} tokens")
    kept = [min(length, seq_len) for length in lengths]
    methods = [
        _padded(kept, [seq_len] * len(kept), "padded"),
        _padded(kept, _longest_in_batch(kept, batch_size), "longest_in_batch"),
        _packed(kept, seq_len),
        _concatenated(lengths, seq_len),
    ]
    tokens = sum(kept)
    return PackingEstimate(
        seq_len=seq_len,
        batch_size=batch_size,
        documents=len(lengths),
        tokens=tokens,
        longest=max(lengths),
        mean=sum(lengths) / len(lengths),
        truncated_documents=sum(length > seq_len for length in lengths),
        truncated_tokens=sum(lengths) - tokens,
        methods=methods,
        verdict=_verdict(methods),
        assumptions=[
            "documents are cut to the sequence's length, except where they are concatenated",
            "packed: best fit, longest document first; at the end of an epoch nothing is dropped",
            "attention is causal over whole sequences; a document mask computes the useful pairs only",
        ],
    )


def best_fit(lengths: Sequence[int], size: int) -> list[int]:
    """Pack lengths into few bins of ``size`` by best-fit decreasing; return the content of each bin.

    At most 11/9 of the fewest bins, and 4 more. Source: Johnson, Demers, Ullman, Garey, Graham 1974.
    """
    bins_with = [0] * (size + 1)  # by the room that is left
    rooms = 0  # bit r is set if a bin has room r
    for length, count in sorted(Counter(lengths).items(), reverse=True):
        for _ in range(count):
            enough = rooms >> length
            room = length + (enough & -enough).bit_length() - 1 if enough else size
            if enough:
                bins_with[room] -= 1
                rooms ^= (bins_with[room] == 0) << room
            left = room - length
            bins_with[left] += 1
            rooms |= 1 << left
    return [size - room for room, count in enumerate(bins_with) for _ in range(count)]


def _longest_in_batch(kept: Sequence[int], batch_size: int) -> list[int]:
    """Length of every document's sequence, padded to the longest of its batch."""
    batches = [kept[start : start + batch_size] for start in range(0, len(kept), batch_size)]
    return [max(batch) for batch in batches for _ in batch]


def _padded(kept: Sequence[int], sizes: Sequence[int], name: str) -> PackingMethod:
    return _method(name, kept, sizes, 0)


def _packed(kept: Sequence[int], seq_len: int) -> PackingMethod:
    return _method("packed", kept, [seq_len] * len(best_fit(kept, seq_len)), 0)


def _concatenated(lengths: Sequence[int], seq_len: int) -> PackingMethod:
    """Documents one after the other, cut wherever a sequence ends."""
    parts: list[int] = []
    cut = at = 0
    for length in lengths:
        ends = at + length
        cut += at // seq_len != (ends - 1) // seq_len
        while at < ends:
            until = min(ends, (at // seq_len + 1) * seq_len)
            parts.append(until - at)
            at = until
    return _method("concatenated", parts, [seq_len] * -(-at // seq_len), cut)


def _method(name: str, parts: Sequence[int], sizes: Sequence[int], cut: int) -> PackingMethod:
    tokens, used = sum(sizes), sum(parts)
    pairs = sum(map(_pairs, sizes))
    return PackingMethod(
        name=name,
        sequences=len(sizes),
        tokens=tokens,
        padding_tokens=tokens - used,
        padding_frac=(tokens - used) / tokens,
        cut_documents=cut,
        attention_pairs=pairs,
        useful_pairs_frac=sum(map(_pairs, parts)) / pairs,
    )


def _pairs(length: int) -> int:
    return length * (length + 1) // 2


def _verdict(methods: Sequence[PackingMethod]) -> list[str]:
    padded, _, packed, _ = methods
    return [
        f"Padding every document takes {format_frac(padded.padding_frac)} of the tokens computed; "
        f"packed it is {format_frac(packed.padding_frac)}.",
        f"Packed, the epoch has {format_count(packed.sequences)} sequences instead of "
        f"{format_count(padded.sequences)}: {padded.tokens / packed.tokens:.2f} times fewer tokens.",
        f"Without a document mask {format_frac(1 - packed.useful_pairs_frac)} of the attention is between "
        "documents or padding.",
    ]
