"""The truth as the analyzers' own tables: what a perfect reader and a perfect attribution would hand on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from fsdp2prof.analyzers.ranks.summary import DeviceWork, RankSummary, summarise
from fsdp2prof.tables.columns import IntArray, Strings
from fsdp2prof.tables.trace import CollectiveTable
from synthetic.kineto import EPOCH_NS
from synthetic.timeline import Collective
from synthetic.world import Recording

TORCH_DTYPE = {"BFloat16": "bfloat16", "Float": "float32"}


def collective_table(
    collectives: Iterable[Collective],
    *,
    offset_ns: int = 0,
    seq: bool = True,
    comms: bool = True,
    groups: bool = True,
) -> CollectiveTable:
    """Build the attributed table; identifiers can be left out, as older torch does."""
    rows = sorted(collectives, key=lambda c: c.start)

    def column(value: Callable[[Collective], int]) -> IntArray:
        return np.asarray([value(c) for c in rows], dtype=np.int64)

    return CollectiveTable(
        start_ns=column(lambda c: c.start + offset_ns),
        end_ns=column(lambda c: c.end + offset_ns),
        issue_ns=column(lambda c: c.issue + offset_ns),
        step=column(lambda c: c.step),
        fqn=Strings.intern(c.fqn for c in rows),
        phase=Strings.intern(c.phase for c in rows),
        op=Strings.intern(c.op for c in rows),
        process_group=Strings.intern(c.group if groups else None for c in rows),
        mesh_dim=Strings.intern(c.mesh_dim for c in rows),
        dtype=Strings.intern(TORCH_DTYPE[c.dtype] for c in rows),
        group_size=column(lambda c: c.group_size),
        payload_bytes=column(lambda c: c.payload_bytes),
        wire_bytes=column(lambda c: c.wire_bytes),
        stream=column(lambda c: 7),
        seq=column(lambda c: c.seq if seq else -1),
        comms_id=column(lambda c: c.comms_id if comms else -1),
    )


def summary_of(
    recording: Recording,
    *,
    keep: Callable[[Collective], bool] = lambda _: True,
    host: str | None = None,
    seq: bool = True,
    comms: bool = True,
    groups: bool = True,
) -> RankSummary:
    """Summarise a simulated rank; ``keep`` drops collectives its trace lost."""
    offset = EPOCH_NS + recording.skew_ns
    device = recording.timeline.device
    work = DeviceWork(
        start_ns=np.asarray([a.start + offset for a in device], dtype=np.int64),
        end_ns=np.asarray([a.end + offset for a in device], dtype=np.int64),
        launch_ns=np.asarray([a.launch + offset for a in device], dtype=np.int64),
        name=Strings.intern(a.name for a in device),
        fqn=Strings.intern(a.fqn for a in device),
        is_comm=np.asarray([a.kind == "comm" for a in device], dtype=np.bool_),
    )
    table = collective_table(
        filter(keep, recording.timeline.collectives),
        offset_ns=offset,
        seq=seq,
        comms=comms,
        groups=groups,
    )
    group_ranks = {c.group: str(list(c.ranks)) for c in recording.timeline.collectives}
    return summarise(table, work, rank=recording.rank, clock=host, group_ranks=group_ranks)
