"""Our numbers beside torch's own, on the same input."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.flight_dumps import call, document, read, write
from torch.utils.data import DistributedSampler
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from fsdp2prof.analyzers.balance import tokens_of_steps
from fsdp2prof.analyzers.hang.analysis import analyze_hang
from fsdp2prof.analyzers.trace.accounting import operations

WORLD = {"0": [0, 1, 2]}


def test_the_sampler_deals_the_same_samples() -> None:
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    (dealt,) = tokens_of_steps(lengths, [0], ranks=3, batch_size=4, micro_batches=1, seq_len=None).values()
    data: Any = lengths
    for rank in range(3):
        sampler: Any = DistributedSampler(data, num_replicas=3, rank=rank, shuffle=False)
        assert dealt[rank].tokens == sum(lengths[index] for index in sampler)


def test_the_flight_recorders_own_analysis_finds_the_same_ranks(tmp_path: Path) -> None:
    """The same documents through ``torch.distributed.flight_recorder``."""
    pytest.importorskip("torch.distributed.flight_recorder", reason="torch 2.7 has it under tools/")
    from torch.distributed.flight_recorder.components.builder import build_db

    def torchs(calls: dict[int, list[Any]]) -> Any:
        details = {str(r): {"rank": r, "host_name": "", **document(own, WORLD)} for r, own in calls.items()}
        for entry in (entry for one in details.values() for entry in one["entries"]):
            entry.setdefault("frames", [])
        options = SimpleNamespace(
            verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
        )
        plain = json.loads(json.dumps(details))
        return build_db(plain, options, "2.10").collectives  # type: ignore[arg-type]

    late = {
        0: [call("all_reduce", 8, 1), call("all_reduce", 8, 2, state="started")],
        1: [call("all_reduce", 8, 1)],
    }
    late[2] = late[0]
    ours = analyze_hang(read(write(tmp_path, late, WORLD), 0, 1, 2)).standings[0]
    theirs = torchs(late)[-1]
    assert (ours.call.seq, set(ours.not_come)) == (theirs.collective_seq_id, theirs.missing_ranks)

    odd = {rank: [call("all_reduce", 9 if rank == 1 else 8, 1)] for rank in range(3)}
    one = analyze_hang(read(write(tmp_path, odd, WORLD), 0, 1, 2)).mismatches[0]
    bad = torchs(odd)[-1]
    assert (one.expected.seq, set(one.ranks)) == (bad.collective_seq_id, set(bad.mismatch_collectives))


def test_the_flop_counter_agrees_on_attention() -> None:
    query, key, value = [2, 8, 32, 16], [2, 8, 24, 16], [2, 8, 24, 12]
    attention = "aten::_scaled_dot_product_flash_attention"
    assert operations(attention, json.dumps([query, key, value])) == sdpa_flop_count(query, key, value)
    gradient = [2, 8, 32, 12]
    assert operations(attention + "_backward", json.dumps([gradient, query, key, value])) == (
        sdpa_backward_flop_count(gradient, query, key, value)
    )
