"""A hand-made document with every kind of block and a hostile name."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.figure import figure
from fsdp2prof.reporters.document import (
    Chart,
    Document,
    Facts,
    Findings,
    KeyFigure,
    Section,
    Sentences,
    Spark,
    Table,
)
from fsdp2prof.reporters.formats import show_kernel
from fsdp2prof.results.finding import Finding
from support.results import HOSTILE

MS, MIB = 10**6, 1 << 20

KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int, float*)"


@dataclass(frozen=True, kw_only=True)
class Said:
    """What the document was made from."""

    schema: str = "test/1"
    names: list[str] = field(default_factory=lambda: [HOSTILE, "\x9b31m"])


def layer_table(layers: list[str | None]) -> Table:
    """Twelve columns, as wide as the widest table there is; numbers are told apart by their digits."""
    times = [(i + 1) * 1_234_567 for i in range(len(layers))]
    sizes = [(i + 1) * 3_456_789 for i in range(len(layers))]
    columns = [
        c.layer(of=0),
        c.text("phase", of=lambda _: "forward"),
        c.op(of=lambda _: "all_gather"),
        c.ms("exposed_ns", "exposed\nms", of=1),
        c.ms("stall_ns", "stall\nms", of=lambda row: row[1] + 1),
        c.ms("total_ns", "total\nms", of=lambda row: row[1] + 2),
        c.sized("payload_bytes", "payload", of=2),
        c.sized("wire_bytes", "wire", of=lambda row: row[2] + 1),
        c.frac("overlap_frac", "overlap", of=lambda row: 0.1 * (row[3] % 9)),
        c.gb_per_s("busbw_bytes_per_s", "busbw\nGB/s", of=lambda row: 1.5e9 * (row[3] + 1)),
        c.name("kernel", show=show_kernel, of=lambda _: KERNEL),
        c.bar("share_frac", of=lambda _: 0.5),
    ]
    sums = {"exposed_ns": sum(times), "stall_ns": 1, "total_ns": 2, "payload_bytes": 3, "wire_bytes": 4}
    return c.table(
        "by_layer",
        "Communication by layer",
        columns,
        zip(layers, times, sizes, range(len(layers)), strict=True),
        note="worst exposed first",
        limit=5,
        totals=[{"fqn": "all", **sums}],
        remarks=["A remark."],
    )


def document(layers: list[str | None] | None = None) -> Document:
    """Every kind of block once."""
    table = layer_table(
        layers or ["", None, HOSTILE, "a.very.long.module.name." * 6, *(f"layers.{i}" for i in range(8))]
    )
    bars = {"type": "bar", "x": [1, 2], "y": [3, 4], "marker": {"color": "#4c78a8"}}
    made = figure([bars], height=140)
    return Document(
        title="Test of 2 ranks",
        subtitle=HOSTILE,
        verdict=["Communication bounds the step.", "Try prefetching."],
        numbers=[
            KeyFigure(value="1.20 ms", label="mean step"),
            KeyFigure(value="3.4%", label="of it exposed"),
        ],
        sections=[
            Section(
                anchor="findings",
                title="Findings",
                blocks=[
                    Findings(
                        title="Findings",
                        findings=[Finding(id="a", severity="high", fqn="layers.0", message=HOSTILE)],
                    ),
                ],
            ),
            Section(
                anchor="communication",
                title="Communication by layer",
                lead="Layers in model order.",
                blocks=[
                    table,
                    Chart(
                        name="course",
                        title="Memory over time",
                        note="bytes",
                        figure=made,
                        spark=Spark(
                            values=[0, 1, 2, 3] * 60, full="12.0 MiB", marks="ffbb" * 60, legend="f forward"
                        ),
                    ),
                    Facts(title="Run", pairs={"command": HOSTILE, "torch": "2.13"}),
                    Sentences(
                        title="Why", lines=["The worst is `layers.0`.", "`<b>` is `text`."], style="list"
                    ),
                    Sentences(title="Careful", lines=[HOSTILE], style="warning"),
                ],
            ),
        ],
        warnings=[HOSTILE],
        result=Said(),
        data=[
            Table(
                name="groups",
                title="",
                columns=[c.layer(), c.number("bytes")],
                rows=[["=HYPERLINK(1)", None], ["a\x1b]52;c;x\x07", 5]],
            )
        ],
    )
