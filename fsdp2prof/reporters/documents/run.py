"""Document of a run: verdict, trace, memory and command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from fsdp2prof.labels import qualified_fqn
from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Block, Document, Facts, Section, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents.brief import changes_worth_most, findings_section, in_order, run_brief
from fsdp2prof.reporters.documents.links import memory_links, trace_links
from fsdp2prof.reporters.documents.memory import memory_data, memory_numbers, memory_sections
from fsdp2prof.reporters.documents.mesh import mesh_blocks
from fsdp2prof.reporters.documents.sharding import rows_blocks
from fsdp2prof.reporters.documents.trace import trace_data, trace_numbers, trace_sections
from fsdp2prof.reporters.documents.trial import trial_section
from fsdp2prof.results.run import RunAnalysis, RunRank, RunSummary, Sharded
from fsdp2prof.units import format_numbers, plural
from fsdp2prof.vocabulary import dtype_label, layer_name, quoted_error

_RANK_ROWS = 8
_HOSTS_NAMED = 4
_SHARD_ROWS = 8


@builds(RunAnalysis)
def run_document(analysis: RunAnalysis) -> Document:
    """Lay out a run with all that is known of it."""
    run, trace, memory = analysis.run, analysis.trace, analysis.memory
    parts = [part for part in (trace, memory) if part is not None]
    changes = changes_worth_most(trace) if trace else []
    sections = in_order(
        [
            *findings_section(analysis.findings, analysis.advice, analysis.verdict),
            *(trace_sections(trace) if trace else ()),
            *(memory_sections(memory) if memory else ()),
            *(trial_section(analysis.trial) if analysis.trial else ()),
            *_layout_sections(analysis),
            *_run_sections(run),
        ]
    )
    return Document(
        title=f"Run {run.path}",
        subtitle=", ".join(part for part in (_state(run), _world(run)) if part),
        changes=changes,
        numbers=[*(trace_numbers(trace) if trace else ()), *(memory_numbers(memory) if memory else ())],
        sections=sections,
        warnings=[*run.messages, *analysis.warnings, *(line for part in parts for line in part.warnings)],
        data=[*(trace_data(trace) if trace else ()), *(memory_data(memory) if memory else ())],
        places=lambda: {
            **(trace_links(trace, sections, analysis.verdict, changes, analysis.findings) if trace else {}),
            **(memory_links(memory, sections) if memory else {}),
        },
        brief=run_brief(analysis),
        brief_lines=60,
    )


def _layout_sections(analysis: RunAnalysis) -> list[Section]:
    """Lay out where the ranks stand, and which rows each holds."""
    blocks = [
        *(mesh_blocks(analysis.mesh) if analysis.mesh else ()),
        *(rows_blocks(analysis.sharding, _SHARD_ROWS) if analysis.sharding else ()),
    ]
    return c.section("layout", "Mesh and shards", *blocks, detail=True)


def _state(run: RunSummary) -> str:
    return run.state + ("" if run.exit_code is None else f", exit code {run.exit_code}")


def _world(run: RunSummary) -> str:
    more = ", ..." if len(run.hosts) > _HOSTS_NAMED else ""
    hosts = f" on {', '.join(run.hosts[:_HOSTS_NAMED])}{more}" if run.hosts else ""
    if run.world_size is None:
        return ""
    if run.rehearsed_rank is not None:
        return f"rehearsed: rank {run.rehearsed_rank} of {run.world_size}{hosts}"
    recorded = [rank.rank for rank in run.ranks if rank.state != "missing"]
    if recorded and len(recorded) < run.world_size:
        ranks = f"rank{'s' * (len(recorded) > 1)} {format_numbers(recorded)}"
        return f"{ranks} of {run.world_size} recorded{hosts}"
    return plural(run.world_size, "rank") + hosts


def _run_sections(run: RunSummary) -> list[Section]:
    facts = {
        "command": shlex.join(run.command),
        "state": _state(run),
        "world": _world(run),
        "started": run.started_at,
        "finished": run.finished_at or "",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(run.versions.items())),
        "optimizer": "; ".join(run.optimizers),
    }
    title = "Command and environment"
    blocks: list[Block] = [Facts(title=title, pairs={name: text for name, text in facts.items() if text})]
    blocks += [_rank_table(run.ranks)] if run.ranks else []
    blocks += [_sharding_table(run)] if run.shard_groups else []
    blocks += [*_facts("Recording options", run.options), *_facts("Environment", run.environment)]
    return c.section("run", title, *blocks, detail=True)


def _facts(title: str, values: Mapping[str, object]) -> list[Facts]:
    pairs = {name: str(value) for name, value in sorted(values.items()) if value is not None}
    return [Facts(title=title, pairs=pairs)] if pairs else []


def _rank_table(ranks: Sequence[RunRank]) -> Table:
    """Return each rank's files, ranks with problems first."""
    columns = [
        c.number("rank"),
        c.state(),
        c.time("median_unrecorded_ns", "unrecorded\nstep", of=_median),
        c.number("steps", of=lambda rank: len(rank.steps)),
        c.text("traced", of=lambda rank: _captured(rank.traced_steps, rank.has_trace)),
        c.text("memory", of=lambda rank: _captured(rank.memory_steps, rank.has_memory)),
        c.text("host", of=lambda rank: rank.host or None),
        c.text("device", of=lambda rank: rank.device or None),
        *(
            [c.prose("error", of=lambda rank: quoted_error(rank.error or ""))]
            if any(rank.error for rank in ranks)
            else []
        ),
    ]
    rows = sorted(ranks, key=lambda rank: (rank.state == "complete", rank.rank))
    note = "ranks with problems first; unrecorded step: median"
    return c.table("ranks", "Ranks", columns, rows, note=note, limit=_RANK_ROWS, noun="rank")


def _median(rank: RunRank) -> int | float | None:
    return None if rank.unrecorded_step is None else rank.unrecorded_step.median_ns


def _captured(steps: Sequence[int], there: bool) -> str | None:
    if not there:
        return None
    if not steps:
        return "yes"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def _sharding_table(run: RunSummary) -> Table:
    """Return the parameter groups, repeated layers that are sharded alike folded."""
    roots = 1 + max(group.root for group in run.shard_groups)
    columns = [
        c.layer("layer", of=_layer),
        c.count("parameters", "params", of="1.parameters"),
        c.count("numel", "elements", of="1.numel"),
        c.sized("sharded_bytes", "shard", of="1.sharded_bytes", unit="all"),
        c.sized("padding_bytes", "padding", of="1.padding_bytes", unit="all"),
        c.text("dtype", of=lambda row: ", ".join(map(dtype_label, row[1].dtype.split(", ")))),
        c.dtype("gathered", of=lambda row: row[1].param_dtype or row[1].dtype),
        c.dtype("reduced", of=lambda row: row[1].reduce_dtype or row[1].param_dtype or row[1].dtype),
        c.text("mesh", of="1.mesh"),
        c.text("reshard", of=lambda row: _reshard(row[1])),
    ]
    return c.table(
        "sharding",
        "How the model is sharded",
        columns,
        [(family.layer, family) for family in run.shard_families],
        every=[(qualified_fqn(group.fqn, group.root, roots), group) for group in run.shard_groups],
        note="parameter groups, on one rank",
        every_note="one row a parameter group, on one rank",
        noun="group",
    )


def _layer(row: tuple[str, Sharded]) -> str:
    layer, group = row
    return layer if group.requires_grad else f"{layer_name(layer)} (frozen)"


def _reshard(group: Sharded) -> str:
    after = group.reshard_after_forward
    policies: dict[bool | int, str] = {True: "after forward", False: "never"}
    policy = policies[after] if isinstance(after, bool) else f"to {after} ranks"
    return policy + (", offload" if group.offload else "")
