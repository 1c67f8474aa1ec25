"""A recorded run's collectives written as NCCL Inspector would: its layers are those of the trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.nccl_files import inspector_lines

from fsdp2prof.manifest import RankManifest
from fsdp2prof.run_directory import MANIFEST_FILE, rank_folder
from fsdp2prof.workflows.analyze import read_tables
from fsdp2prof.workflows.job.job_files import open_job
from fsdp2prof.workflows.nccl import analyze_nccl

from .conftest import Recorded


@pytest.mark.parametrize(
    ("script", "lost"),
    [
        ("train_tiny_fsdp2", 0),
        ("train_tiny_fsdp2", 3),
        pytest.param("nested", 0, marks=pytest.mark.slow),
    ],
    ids=["from a step's beginning", "from the middle of a step", "groups inside groups"],
)
def test_layers_are_those_of_the_trace(
    recorded: Callable[..., Recorded], tmp_path: Path, script: str, lost: int
) -> None:
    run = recorded(script, 2).run
    expected: Counter[tuple[str | None, ...]] = Counter()
    for file, tables in read_tables(open_job(run)):
        rank = file.rank
        table = tables.collectives.table
        table = table.take(np.argsort(table.issue_ns))
        numbers: dict[str, int] = defaultdict(int)
        records = []
        for op, payload, fqn, phase in zip(
            table.op.to_list(),
            table.payload_bytes.tolist(),
            table.fqn.to_list(),
            table.phase.to_list(),
            strict=True,
        ):
            if fqn is None or op is None:
                continue
            if numbers[op] >= lost:
                records.append((op, numbers[op], payload // 2, 100))
                expected[op, fqn, phase] += rank == 0
            numbers[op] += 1
        manifest = msgspec.json.decode(
            (run / rank_folder(rank) / MANIFEST_FILE).read_bytes(), type=RankManifest
        )
        lines = inspector_lines(rank, records, name="unknown")
        text = "\n".join(lines).replace('"pid":100' + str(rank), f'"pid":{manifest.pid}')
        (tmp_path / f"{manifest.host}-pid{manifest.pid}.log").write_text(
            text.replace('"hostname":"node0"', f'"hostname":"{manifest.host}"')
        )
    found = analyze_nccl(tmp_path, run=run)
    assert Counter({(row.op, row.fqn, row.phase): row.count for row in found.collectives}) == expected
    assert len({key[1] for key in expected}) > 2
    assert [row.rank for row in found.ranks] == [0, 1]
    assert all(row.layer_known for row in found.collectives)
