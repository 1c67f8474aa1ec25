"""A trace written down by hand: ranges, kernels and collectives at chosen nanoseconds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdp2prof.manifest import DeviceInfo, ProcessGroupInfo
from fsdp2prof.tables.columns import Strings
from fsdp2prof.tables.trace import CollectiveArgs, EventTable, LabelTable, MemoryEventTable, ShapeTable, Trace

WORKER = 9
"""A thread that carries out gloo's collectives."""


@dataclass
class TraceBuilder:
    """Collects events; ``build`` sorts them into a :class:`Trace`."""

    process_groups: tuple[ProcessGroupInfo, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    ids: Any = field(default_factory=lambda: itertools.count(1))

    def host(
        self, name: str, start: int, end: int, category: str = "cpu_op", thread: int = 0, **args: Any
    ) -> None:
        """Add a host range; ``args`` are collective metadata, ``dims`` and ``types`` recorded shapes."""
        self.rows.append(
            {"name": name, "start": start, "end": end, "category": category, "thread": thread, "args": args}
        )

    def label(self, name: str, start: int, end: int, thread: int = 0) -> None:
        """Add a ``record_function`` range."""
        self.host(name, start, end, "user_annotation", thread)

    def device(
        self,
        name: str,
        start: int,
        end: int,
        launch: int | None,
        stream: int = 7,
        category: str = "kernel",
        thread: int = 0,
        **args: Any,
    ) -> None:
        """Add a device activity, launched at ``launch`` by a call of 1 ns (``None``: not in the file)."""
        correlation = next(self.ids)
        if launch is not None:
            self.host("cudaLaunchKernel", launch, launch + 1, "cuda_runtime", thread)
            self.rows[-1]["correlation"] = correlation
        self.rows.append(
            {
                "name": name,
                "start": start,
                "end": end,
                "category": category,
                "device": 0,
                "stream": stream,
                "correlation": correlation,
                "args": args,
            }
        )

    def build(self) -> Trace:
        rows = sorted(self.rows, key=lambda row: (row["start"], -row["end"]))

        def ints(key: str) -> Any:
            return np.array([row.get(key, -1) for row in rows], dtype=np.int64)

        events = EventTable(
            start_ns=ints("start"),
            end_ns=ints("end"),
            name=Strings.intern(row["name"] for row in rows),
            category=Strings.intern(row["category"] for row in rows),
            thread=ints("thread"),
            device=ints("device"),
            stream=ints("stream"),
            correlation=ints("correlation"),
            external_id=ints("external_id"),
            bytes=ints("bytes"),
        )
        described = [(i, row["args"]) for i, row in enumerate(rows) if set(row["args"]) - {"dims", "types"}]
        shaped = [(i, row["args"]) for i, row in enumerate(rows) if "dims" in row["args"]]
        label = events.category.equals("user_annotation")
        numbers = ("in_nelems", "out_nelems", "group_size", "seq", "comms_id", "is_async")
        texts = ("collective", "dtype", "process_group", "process_group_desc", "ranks")
        columns: dict[str, Any] = {
            **{n: np.array([a.get(n, -1) for _, a in described], dtype=np.int64) for n in numbers},
            **{n: Strings.intern(a.get(n) for _, a in described) for n in texts},
        }
        return Trace(
            source="hand.json",
            rank=0,
            world_size=2,
            device=DeviceInfo(type="cuda", index=0) if (events.device >= 0).any() else DeviceInfo(type="cpu"),
            process_groups=self.process_groups,
            base_time_ns=0,
            events=events,
            collective_args=CollectiveArgs(
                event=np.array([i for i, _ in described], dtype=np.int64),
                **columns,
            ),
            labels=LabelTable(
                thread=events.thread[label].astype(np.int64),
                start_ns=events.start_ns[label],
                end_ns=events.end_ns[label],
                name=events.name.take(label),
            ),
            shapes=ShapeTable(
                event=np.array([i for i, _ in shaped], dtype=np.int64),
                dims=Strings.intern(a["dims"] for _, a in shaped),
                types=Strings.intern(a.get("types", "") for _, a in shaped),
            ),
            memory=MemoryEventTable.empty(),
            threads=("main",),
            warnings=(),
        )


def two_kernel_trace() -> Trace:
    """One operator of step 3 launches two kernels on stream 7 and waits for them."""
    built = TraceBuilder()
    built.label("ProfilerStep#3", 0, 1_000_000)
    built.host("aten::op", 1_000, 900_000)
    built.device("first_kernel", 15_000, 215_000, launch=5_000)
    built.device("second_kernel", 235_500, 535_500, launch=20_000)
    return built.build()
