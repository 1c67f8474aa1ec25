"""Documents of the estimates of memory, communication and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.memory import memory_layer_chart
from fsdp2prof.reporters.document import Chart, Document, Facts, KeyFigure, Section, Sentences, Table, Value
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents.brief import in_order
from fsdp2prof.reporters.documents.links import section_links
from fsdp2prof.reporters.documents.memory_tables import (
    largest_layer,
    layer_memory_table,
    remedy_table,
)
from fsdp2prof.reporters.documents.trace import trace_data, trace_sections
from fsdp2prof.reporters.formats import show_gb_per_s
from fsdp2prof.results.estimate import (
    CheckpointEstimate,
    CommEstimate,
    CommRow,
    ConfigRead,
    EstimatedMesh,
    EstimatedModel,
    EstimatedPolicy,
    MemoryEstimate,
    PackingEstimate,
    StepEstimate,
)
from fsdp2prof.units import format_bytes, format_count, format_frac, format_ns, plural
from fsdp2prof.vocabulary import FITS, KERNEL_BOUNDS, packing_label


@builds(PackingEstimate)
def packing_estimate_document(estimate: PackingEstimate) -> Document:
    """Lay out a packing estimate: one row a way to make sequences."""
    columns = [
        c.text("name", "method", packing_label),
        c.count("sequences"),
        c.count("tokens"),
        c.count("padding_tokens", "padding"),
        c.frac("padding_frac", "of tokens"),
        c.bar("padding_frac"),
        c.count("cut_documents", "cut"),
        c.frac("useful_pairs_frac", "useful attention"),
    ]
    given = {
        "documents": format_count(estimate.documents),
        "tokens": format_count(estimate.tokens),
        "mean length": f"{estimate.mean:,.1f}",
        "longest": format_count(estimate.longest),
        "longer than a sequence": f"{format_count(estimate.truncated_documents)}, of which "
        f"{format_count(estimate.truncated_tokens)} tokens are cut off",
    }
    what = "Configuration"
    assumed = Sentences(title="Assumptions", lines=estimate.assumptions, style="list")
    methods = c.table("methods", "By method", columns, estimate.methods)
    return Document(
        title="Packing",
        subtitle=f"sequences of {format_count(estimate.seq_len)} tokens, batches of {estimate.batch_size}",
        sections=[
            Section(anchor="methods", title="Padding", blocks=[methods]),
            Section(anchor="given", title=what, blocks=[Facts(title=what, pairs=given), assumed]),
        ],
    )


_LAYER_ROWS = 12
_GIVEN = "Configuration"


# What an estimate is of.


def _subtitle(estimate: MemoryEstimate | CommEstimate | CheckpointEstimate, device: str | None = None) -> str:
    """Describe the configuration of the estimate, in one line."""
    model, mesh, policy = estimate.model, estimate.mesh, estimate.policy
    sizes = ", ".join(f"{name}={size}" for name, size in _dimensions(mesh).items() if size > 1)
    in_stage = f" in stage {policy.pp_stage} of {mesh.pp}" if (mesh.pp or 1) > 1 else ""
    parts = [
        f"{format_count(model.parameters)} parameters{in_stage}",
        plural(mesh.world_size, "rank") + (f" ({sizes})" if sizes else ""),
    ]
    if policy.get("batch_size") is not None and policy.get("seq_len") is not None:
        parts.append(f"batch {format_count(policy.batch_size)} x {format_count(policy.seq_len)} tokens")
    return ", ".join([*parts, *([] if device is None else [device])])


def _given(estimate: MemoryEstimate | CommEstimate | CheckpointEstimate) -> Section:
    """Show the inputs, every option that is set, and the other assumptions."""
    pairs = {
        "model": _named(estimate.model),
        "mesh": _listed(_dimensions(estimate.mesh)),
        **_by_group(estimate.policy),
    }
    assumed = Sentences(title="Assumptions", lines=estimate.assumptions, style="list")
    return Section(
        anchor="given", title=_GIVEN, blocks=[Facts(title=_GIVEN, pairs=pairs), assumed], detail=True
    )


def _named(model: EstimatedModel) -> str:
    return f"{model.name}, {plural(model.blocks, 'block')}" if model.blocks is not None else model.name


def _by_group(policy: EstimatedPolicy) -> dict[str, str]:
    """Return the options that are set, under the headings of their declaration."""
    groups: dict[str, dict[str, object]] = {}
    for name, declared in options_of(PolicySpec).items():
        if policy.get(name) not in (None, False, 0):
            groups.setdefault(declared.group.lower(), {})[name] = policy[name]
    return {group: _listed(values) for group, values in groups.items()}


def _dimensions(mesh: EstimatedMesh) -> dict[str, int]:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    sizes = {name: size for name in names if (size := getattr(mesh, name)) is not None}
    return mesh.dims or sizes


def _listed(values: Mapping[str, object]) -> str:
    """Write options as users type them: ``ac=op, compile``."""
    texts = []
    for name, value in values.items():
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        texts.append(name if value is True else f"{name}={text}")
    return ", ".join(texts)


def config_section(config: ConfigRead | None) -> list[Section]:
    """Say which keys of a trainer's configuration became which options; nothing without one."""
    if config is None:
        return []
    table = c.table(
        "config",
        f"Read as {config.format}",
        [
            c.name("key", "key", of=lambda row: f"{row.key} = {row.value}"),
            c.prose("option", "option", of=lambda row: f"{row.option} = {row.became}"),
            c.name("source", "from"),
        ],
        sorted(config.rows, key=lambda row: not row.given),
        note=f"in brackets: the version whose keys are known; estimated as stack {config.stack}",
    )
    unused = {
        "not known to this reader, no effect": config.not_known,
        "no effect on an estimate": config.without_effect,
    }
    lines = {
        "Noted": config.notes,
        "Still unknown": config.open,
        "Not used": [f"{why}: {', '.join(keys)}" for why, keys in unused.items() if keys],
    }
    said = [Sentences(title=title, lines=some, style="list") for title, some in lines.items() if some]
    return [
        Section(
            anchor="config",
            title="The trainer's configuration",
            blocks=[*said, table],
            detail=not (config.open or config.not_known),
        )
    ]


# Memory.


@builds(MemoryEstimate)
def memory_estimate_document(estimate: MemoryEstimate) -> Document:
    """Lay out a memory estimate: the peak, whether it fits, its contents, and changes that would lower it."""
    remedies = remedy_table("Changes that lower the peak", estimate.remedies)
    layers = layer_memory_table(estimate.peak)
    about = ["range", "peak"]
    if estimate.fit is not None:
        about = ["range", "range", "peak" if estimate.fit == "fits" or not estimate.remedies else "remedies"]
    sections = [
        Section(
            anchor="peak",
            title="Peak by kind",
            lead="Categories and layers sum exactly to the bytes in use at the peak.",
            blocks=[
                _category_table(estimate),
                *_peak_chart(estimate),
            ],
        ),
        *_tried(estimate),
        Section(anchor="remedies", title=remedies.title, blocks=[remedies]),
        *c.section("layers", layers.title, layers),
        *config_section(estimate.config),
        Section(
            anchor="range",
            title="Unknowns",
            blocks=_range_blocks(estimate),
            detail=not estimate.depends_on,
        ),
        Section(
            anchor="steps",
            title="Step by step",
            blocks=[_step_table(estimate), _stream_table(estimate), _layer_table(estimate)],
            detail=True,
        ),
        _given(estimate),
    ]
    return Document(
        title=f"Memory of one rank of {estimate.model.name}",
        subtitle=_subtitle(estimate, estimate.device),
        numbers=_memory_numbers(estimate),
        places=lambda: section_links(sections, estimate.verdict, about),
        sections=sections,
    )


def _memory_numbers(estimate: MemoryEstimate) -> list[KeyFigure]:
    outside = estimate.outside_allocator_bytes
    numbers = [
        KeyFigure(value=format_bytes(estimate.peak.reserved_bytes), label="reserved"),
        KeyFigure(value=format_bytes(estimate.peak.active_bytes), label="in use"),
        KeyFigure(
            value=f"{format_bytes(outside.low)} to {format_bytes(outside.high)}",
            label="outside the allocator",
        ),
    ]
    if estimate.fit is not None and estimate.device_total_bytes is not None:
        device = f"{estimate.device}, {format_bytes(estimate.device_total_bytes)}"
        numbers.append(KeyFigure(value=FITS[estimate.fit].label, label=f"on {device}"))
    policy = estimate.policy
    if policy.offload or policy.offload_optimizer or policy.offload_activations:
        numbers.append(KeyFigure(value=format_bytes(estimate.host_bytes), label="of host memory"))
    return numbers


def _peak_chart(estimate: MemoryEstimate) -> list[Chart]:
    layers = estimate.peak.layers_folded
    figure = memory_layer_chart(layers)
    return [Chart(name="layers_at_peak", title=largest_layer(layers), figure=figure)] if figure else []


def _category_table(estimate: MemoryEstimate) -> Table:
    columns = [c.category(), c.sized("bytes"), c.frac("frac", "share"), c.bar("frac")]
    whole: dict[str, Value] = {"category": "all", "bytes": estimate.peak.active_bytes}
    return c.table("by_category", "By kind", columns, estimate.peak.by_category, totals=[whole])


def _stream_table(estimate: MemoryEstimate) -> Table:
    columns = [c.text("stream", of=0), c.sized("reserved_bytes", "reserved", of=1)]
    whole: dict[str, Value] = {"stream": "all", "reserved_bytes": estimate.peak.reserved_bytes}
    note = "each stream has its own pool of blocks"
    streams = estimate.peak.streams.items()
    return c.table("by_stream", "Reserved by stream", columns, streams, note=note, totals=[whole])


def _step_table(estimate: MemoryEstimate) -> Table:
    columns = [
        c.number("step"),
        c.sized("reserved_bytes", "reserved", unit="all"),
        c.sized("active_bytes", "in use", unit="all"),
    ]
    note = "optimizer state is created at the end of the first step"
    return c.table("steps", "Step by step", columns, estimate.steps, note=note)


def _layer_table(estimate: MemoryEstimate) -> Table:
    columns = [
        c.layer(),
        c.text("phase"),
        c.sized("peak_bytes", "peak", unit="all"),
        c.sized("delta_bytes", "growth", unit="all"),
    ]
    layers = sorted(estimate.layers, key=lambda layer: -layer.peak_bytes)
    return c.table("layers", "Most bytes in use while a layer ran", columns, layers, limit=_LAYER_ROWS)


def _range_blocks(estimate: MemoryEstimate) -> list[Sentences | Table]:
    """Return the unknowns and the memory outside the allocator, with the source of each range."""
    depends = Sentences(title="Whether it fits depends on", lines=estimate.depends_on, style="list")
    outside = estimate.outside_allocator_bytes
    unknowns = c.table(
        "unknowns",
        "Unknowns that move the reserved peak",
        [
            c.text("name", "what"),
            c.sized("low_bytes", "least", unit="all"),
            c.sized("high_bytes", "most", unit="all"),
        ],
        estimate.unknowns,
        remarks=[f"{one.name}: {one.why}" for one in estimate.unknowns],
    )
    parts = c.table(
        "outside_allocator",
        "Outside the allocator",
        [
            c.text("name", "what"),
            c.sized("low_bytes", "least", of="low", unit="all"),
            c.sized("high_bytes", "most", of="high", unit="all"),
        ],
        outside.parts,
        scale=[outside],
        totals=[{"name": "all", "low_bytes": outside.low, "high_bytes": outside.high}],
        remarks=[f"{part.name}: {part.source}" for part in outside.parts],
    )
    return [
        *([depends] if estimate.depends_on else []),
        *([unknowns] if estimate.unknowns else []),
        parts,
    ]


def _tried(estimate: MemoryEstimate) -> list[Section]:
    """Show the changes that were estimated as well; those that fit first."""
    if not estimate.tried:
        return []
    title = "Changes that were tried"
    table = c.table(
        "tried",
        title,
        [
            c.prose("changes", "change"),
            c.text("fits", show=lambda fits: "yes" if fits else "no"),
            c.sized("reserved_bytes", "reserved", unit="all"),
            c.sized("headroom_bytes", "left", unit="all"),
        ],
        sorted(estimate.tried, key=lambda one: not one.fits),
        note="each estimated like the run itself; left: with all but the prediction's error at its highest",
        remarks=[] if any(one.fits for one in estimate.tried) else estimate.advice,
    )
    return [Section(anchor="tried", title=title, blocks=[table])]


# Communication.


@builds(CommEstimate)
def comm_estimate_document(estimate: CommEstimate) -> Document:
    """Lay out a communication estimate: sums by operation, then layers."""
    total = estimate.total
    less = "Changes that send less"
    return Document(
        title=f"Communication of one rank of {estimate.model.name} in one step",
        subtitle=_subtitle(estimate),
        numbers=[
            KeyFigure(value=format_bytes(total.wire_bytes), label="sent by a rank in a step"),
            KeyFigure(value=format_bytes(total.payload_bytes), label="payload"),
            KeyFigure(value=format_count(total.count), label="collectives"),
        ],
        sections=[
            Section(
                anchor="communication",
                title="Communication",
                lead="Payload is the output of an all-gather, the input of a reduce-scatter; wire is "
                "what the rank sends.",
                blocks=[_operation_table(estimate), _collective_table(estimate)],
            ),
            *_sync_sections(estimate),
            *c.section("advice", less, Sentences(title=less, lines=estimate.advice, style="list")),
            *config_section(estimate.config),
            _given(estimate),
        ],
        data=[c.data("groups", "Collectives", CommRow, estimate.groups, leave="layers")],
    )


_PER = {"parameter": "parameter", "layer": "FSDP unit", "whole": "parameter, all of them kept"}


def _sync_sections(estimate: CommEstimate) -> list[Section]:
    """Show the transfer of the weights to inference engines, if it was requested."""
    sync = estimate.weight_sync
    if sync is None:
        return []
    where = f"{sync.engines} engines of {sync.engine_tp} ranks" if sync.engines else "engines on these ranks"
    gathered, held = format_bytes(sync.gather_wire_bytes), format_bytes(sync.buffer_bytes)
    sent, received = format_bytes(sync.sent_bytes), format_bytes(sync.received_bytes)
    lines = [
        f"{format_count(sync.gathers)} all-gathers, one per {_PER[sync.per]}: {gathered} sent by each rank, "
        f"{held} held at once at most",
        f"{format_count(sync.broadcasts)} broadcasts in {sync.dtype}: {sent} sent by one rank, {received} "
        "received by all together",
        f"{format_bytes(sync.kept_bytes)} held by each rank of an engine",
    ]
    rate = sync.bandwidth_bytes_per_s
    if rate is not None and sync.gather_seconds is not None and sync.send_seconds is not None:
        gathering, sending = (format_ns(one * 1e9) for one in (sync.gather_seconds, sync.send_seconds))
        lines.append(
            f"{gathering} to gather and {sending} to broadcast at {format_bytes(rate)}/s, without latency; "
            "less where the two overlap"
        )
    return c.section(
        "weight-sync",
        "Weights to inference engines",
        Sentences(title="Once", lines=lines, style="list"),
        lead=f"After a step, to {where}; not among the collectives above.",
    )


def _operation_table(estimate: CommEstimate) -> Table:
    columns = [
        c.op(of=0),
        c.count("count", of="1.count"),
        c.sized("payload_bytes", "payload", of="1.payload_bytes"),
        c.sized("wire_bytes", "wire", of="1.wire_bytes"),
        c.frac("wire_frac", "of wire", of="1.wire_frac"),
        c.bar("wire_frac", of="1.wire_frac"),
    ]
    whole = {**asdict(estimate.total), "op": "all", "wire_frac": None}
    return c.table("per_step", "By operation", columns, estimate.per_step.items(), totals=[whole])


def _collective_table(estimate: CommEstimate) -> Table:
    several = len({row.root for row in estimate.groups}) > 1
    columns = [
        c.layer(of=lambda row: _in_its_model(row, several)),
        c.text("phase"),
        c.op(),
        c.text("over", of=lambda row: f"{row.mesh_dim or row.process_group or '-'} ({row.group_size})"),
        c.dtype(),
        c.count("count"),
        c.sized("payload_bytes", "payload"),
        c.sized("wire_bytes", "wire"),
    ]
    note = "layers with identical traffic are summed in one row"
    folded, every = estimate.groups_folded, estimate.groups
    return c.table("by_layer", "By layer", columns, folded, every=every, note=note, every_note="")


def _in_its_model(row: CommRow, several: bool) -> str | None:
    """Return a layer's name, with its model's if there are several: ``root1:layers.0``."""
    return f"root{row.root}:{row.fqn}" if several and row.fqn is not None else row.fqn


# Checkpoints.


@builds(CheckpointEstimate)
def checkpoint_estimate_document(estimate: CheckpointEstimate) -> Document:
    """Lay out a checkpoint estimate: the bytes, the ranks that write them, and the time."""
    bandwidth = estimate.bandwidth_bytes_per_s
    sizes = c.table(
        "sizes",
        "Sizes",
        [
            c.text("what", of=0),
            c.sized("bytes", "size", of=1),
            c.count("files", of=2),
            c.number("seconds", show=lambda value: "-" if value is None else f"{value:,.1f}", of=3),
        ],
        [
            ("sharded checkpoint", estimate.sharded_bytes, estimate.files, estimate.sharded_seconds),
            ("  parameters", estimate.parameter_bytes, None, None),
            ("  optimizer state", estimate.optimizer_bytes, None, None),
            ("  largest file", estimate.rank_bytes_max, None, None),
            ("  smallest file", estimate.rank_bytes_min, None, None),
            ("full state dict", estimate.full_bytes, None, estimate.full_seconds),
            ("  of the model alone", estimate.full_parameter_bytes, None, None),
        ],
        remarks=[f"Time at {show_gb_per_s(bandwidth)} GB/s for each rank that writes."] if bandwidth else [],
        known=True,
    )
    return Document(
        title=f"Checkpoint of {estimate.model.name}",
        subtitle=_subtitle(estimate),
        sections=[
            Section(anchor="sizes", title="Sizes", blocks=[sizes]),
            *config_section(estimate.config),
            _given(estimate),
        ],
    )


@builds(StepEstimate)
def step_estimate_document(estimate: StepEstimate) -> Document:
    """Lay out a step estimate."""
    sections = [
        *in_order([*trace_sections(estimate.trace, predicted=True), *_kernel_section(estimate)]),
        *config_section(estimate.config),
        Section(
            anchor="assumptions",
            title="Assumptions",
            blocks=[
                Sentences(title="Unknowns that the range covers", lines=estimate.range.unknown, style="list"),
                Sentences(title="Assumptions", lines=estimate.assumptions, style="list"),
            ],
            detail=True,
        ),
    ]
    return Document(
        title="Step time",
        subtitle=_what(estimate),
        numbers=_numbers(estimate),
        places=lambda: section_links(sections, estimate.verdict, ("lost", "estimate", "communication")),
        sections=sections,
        data=trace_data(estimate.trace),
    )


def _what(estimate: StepEstimate) -> str:
    use = estimate.hardware
    nodes = "" if use.nodes == 1 else f" on {plural(use.nodes, 'node')}, {use.network}"
    ranks = estimate.mesh.world_size
    return f"{estimate.model.name}, {ranks:,} x {use.name}{nodes}"


def _numbers(estimate: StepEstimate) -> list[KeyFigure]:
    figures = [
        KeyFigure(value=format_ns(estimate.step_ns), label="per step"),
        KeyFigure(value=f"{estimate.tokens_per_s_per_gpu:,.0f}", label="tokens/s per GPU"),
    ]
    if estimate.mfu is not None:
        figures.append(KeyFigure(value=format_frac(estimate.mfu), label="MFU"))
        figures.append(KeyFigure(value=format_frac(estimate.hfu), label="HFU"))
    if estimate.bubble_ns:
        figures.append(KeyFigure(value=format_ns(estimate.bubble_ns), label="of it pipeline bubble"))
    return figures


def _kernel_section(estimate: StepEstimate) -> list[Section]:
    """Show the limits of the compute stream."""
    columns = [
        c.word("bound_by", "bound by", KERNEL_BOUNDS, of=0),
        c.ms("duration_ns", "ms", of=1),
        c.frac("step_frac", "of the step", of=lambda row: row[1] / estimate.step_ns),
        c.bar("step_frac", of=lambda row: row[1] / estimate.step_ns),
    ]
    rows = sorted(estimate.kernels_ns.items(), key=lambda item: -item[1])
    table = c.table("kernels", "Compute stream by bound", columns, rows)
    return c.section("estimate", table.title, table)
