"""Tables that nccl-tests and rccl-tests print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
}
"""The programs, without ``_perf``, and the collectives that they time."""
_PROGRAM = re.compile(rf"({'|'.join(_OPS)})_perf")
_NAME = re.compile("|".join(_OPS))
_RANK = re.compile(
    r"#\s+Rank\s+\d+\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]\n]*\]\s+(\S.*?)\s*$",
    re.MULTILINE,
)
"""A rank's host and device."""
_ROW = re.compile(
    r"^(?:\[[^\]\n]*\]<\w+>:)?[ \t]*(\d{1,18})[ \t]+\d+[ \t]+[a-z]\w*[ \t]+"
    r"(?:[a-z]+[ \t]+(?:(?:-1|\d\d?)[ \t]+)?)?(\d{1,15}(?:\.\d{1,15})?)(?:[ \t]+\d+(?:\.\d+)?){2}[ \t]",
    re.MULTILINE,
)
"""Size in bytes, and microseconds out of place; mpirun may put the rank before the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One run of one program."""

    op: str
    ranks: int
    hosts: int
    device: str
    """As the driver names it."""
    curve: list[tuple[int, int]]
    """Bytes, of all ranks' parts together for gathers and scatters, and nanoseconds; by size."""


def tables_of(text: str, name: str) -> Iterator[Table]:
    """Yield the tables of an output, or of several in one file, which is called ``name``.

    Raises ``ValueError`` for one without ranks, rows or the name of its program.
    """
    parts = re.split(r"(?m)^(?=.*#\s*nThread\s)", text)
    before = parts[0]
    if len(parts) == 1:
        raise ValueError("no output of nccl-tests or rccl-tests (a line of nThread) is in it")
    for part in parts[1:]:
        ranks = _RANK.findall(part)
        program = _PROGRAM.findall(before)[-1:] or _NAME.findall(name)[:1]
        times: dict[int, float] = {}
        for size, microseconds in _ROW.findall(part):
            if int(size):
                times[int(size)] = min(float(microseconds), times.get(int(size), float("inf")))
        if not program:
            raise ValueError("it does not name its collective: call the file all_gather.txt or similar")
        if not ranks or not times:
            raise ValueError(f"the table of {program[0]} has no {'rows' if ranks else 'ranks'}")
        yield Table(
            op=_OPS[program[0]],
            ranks=len(ranks),
            hosts=len({host for host, _ in ranks}),
            device=ranks[0][1],
            curve=[(size, round(1000 * time)) for size, time in sorted(times.items())],
        )
        before = part
