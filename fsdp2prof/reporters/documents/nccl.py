"""Document of NCCL's own logs: communicators and their links, collectives and their speed, ranks."""

from __future__ import annotations

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Document, KeyFigure, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents.brief import findings_section
from fsdp2prof.results.nccl import NcclAnalysis
from fsdp2prof.vocabulary import layer_name

_ROWS = 24
_RANKS = 16


@builds(NcclAnalysis)
def nccl_document(found: NcclAnalysis) -> Document:
    """Show the content of NCCL's files for a job."""
    said = " ".join(found.verdict)
    return Document(
        title="NCCL logs",
        numbers=[
            KeyFigure(value=str(found.inspected), label="processes inspected"),
            KeyFigure(value=str(found.logged), label="processes with a log"),
        ],
        sections=[
            *findings_section([one for one in found.findings if one.message not in said]),
            *c.section("communicators", "Communicators", *_communicators(found)),
            *c.section("collectives", "Collectives", _collectives(found)),
            *c.section("ranks", "Ranks", _ranks(found)),
        ],
    )


def _communicators(found: NcclAnalysis) -> list[Table]:
    columns = [
        c.name("name", "communicator"),
        c.number("size", "ranks"),
        c.number("nodes"),
        c.number("ranks_seen", "seen"),
        c.number("channels"),
        c.name("network", "devices", of="nics"),
        c.name("ring", "first ring", of=lambda one: " ".join(map(str, one.ring)) or None),
        c.prose("causes", "slow by"),
    ]
    transports = [
        c.name("communicator", of="0.name"),
        c.name("transport", "through", of="1.transport"),
        c.count("connections", of="1.connections"),
        c.count("across_nodes", "between\nnodes", of="1.across_nodes"),
    ]
    note = "channels from one rank to another; both ends log a network's"
    rows = [(one, part) for one in found.communicators for part in one.transports]
    return [
        c.table(
            "communicators",
            "Communicators",
            columns,
            found.communicators,
            note="those with a known cause of slowness first",
            known=True,
            limit=_ROWS,
            noun="communicator",
        ),
        c.table(
            "transports",
            "Connections between ranks",
            transports,
            rows,
            note=note,
            limit=_ROWS,
            noun="transport",
        ),
    ]


def _collectives(found: NcclAnalysis) -> Table:
    columns = [
        c.name("communicator"),
        c.op(),
        c.name("fqn", "layer", of=lambda one: layer_name(one.fqn) if one.layer_known else None),
        c.text("phase"),
        c.text("dtype"),
        c.sized("payload_bytes", "payload"),
        c.count("count", "n"),
        c.ms("mean_ns", "time"),
        c.ms("waiting_ns", "waiting"),
        c.gb_per_s("bus_bytes_per_s", "busbw\nGB/s"),
        c.text("algorithm"),
        c.text("protocol"),
    ]
    note = "time: from the arrival of the last rank; waiting: of the first rank for the last"
    noun = "collective"
    return c.table(
        "collectives", "Collectives", columns, found.collectives, note=note, limit=_ROWS, noun=noun
    )


def _ranks(found: NcclAnalysis) -> Table:
    columns = [
        c.number("rank"),
        c.name("host"),
        c.number("pid", "process"),
        c.count("collectives"),
        c.ms("duration_ns", "in them"),
        c.count("came_last", "came\nlast"),
        c.count("dropped"),
    ]
    note = "came last: counted in collectives that several ranks logged"
    return c.table("ranks", "Ranks", columns, found.ranks, note=note, limit=_RANKS, noun="rank")
