"""Document of a plan: the winner, the best of every family, settings to paste, memory against throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.charts.figure import INK, Figure, figure
from fsdp2prof.reporters.document import (
    Chart,
    Column,
    Document,
    Facts,
    KeyFigure,
    Link,
    Section,
    Sentences,
    Table,
)
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.documents.estimate import config_section
from fsdp2prof.reporters.documents.links import Finder, Links
from fsdp2prof.reporters.formats import show_amount
from fsdp2prof.results.plan import Plan, PlanFamily, PlanPoint
from fsdp2prof.units import format_bytes, format_count, format_frac, format_ns, plural
from fsdp2prof.vocabulary import printable

_GIB = 1 << 30
_FRONT, _FAMILY, _OVER = "#4c78a8", "#f58518", "#e45756"


def pareto_chart(plan: Plan) -> Figure | None:
    """Plot the Pareto front and the best of each family; None without a configuration that fits."""
    if not plan.pareto:
        return None
    best = [family.best for family in plan.families]
    fitting = [point for point in best if point.headroom_bytes >= 0]
    over = [point for point in best if point.headroom_bytes < 0 and _near(point, plan)]
    data = [
        {**_points("Pareto front", plan.pareto, _FRONT), "mode": "lines+markers"},
        _points("best of each family", fitting, _FAMILY),
        _points("does not fit", over, _OVER, symbol="x"),
    ]
    if plan.winner is not None:
        data.append(_points("winner", [plan.winner], INK, symbol="star", size=15))
    speeds = [point.tokens_per_s_per_gpu for point in (*plan.pareto, *best)]
    limit = plan.given.limit_bytes / _GIB
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "limit",
            "x": [limit, limit],
            "y": [0, max(speeds)],
            "line": {"color": _OVER, "dash": "dot"},
            "hovertemplate": f"limit, {limit:.1f} GiB<extra></extra>",
        }
    )
    return figure(
        [trace for trace in data if trace["x"]], height=420, x="GiB on each GPU", y="tokens/s per GPU"
    )


def _near(point: PlanPoint, plan: Plan) -> bool:
    """Whether a point that does not fit is near enough to be shown in the same picture."""
    return point.total_bytes <= 2 * plan.given.device_total_bytes


def _points(
    name: str, points: Sequence[PlanPoint], colour: str, *, symbol: str = "circle", size: int = 9
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [point.total_bytes / _GIB for point in points],
        "y": [point.tokens_per_s_per_gpu for point in points],
        "text": [_hover(point) for point in points],
        "marker": {"color": colour, "symbol": symbol, "size": size},
        "hovertemplate": "%{text}<extra></extra>",
    }


def _hover(point: PlanPoint) -> str:
    lines = [
        escape(printable(point.name)),
        f"{format_bytes(point.total_bytes)}, {point.tokens_per_s_per_gpu:,.0f} tokens/s per GPU",
        f"step {format_ns(point.step_ns)}, {format_frac(point.exposed_frac)} exposed, "
        f"MFU {format_frac(point.mfu)}",
        "from the engine" if point.confirmed else "from the search",
    ]
    return "<br>".join(lines)


_ROWS = 8
_OF_A_STEP = "why: percent of the winner's step"


@builds(Plan)
def plan_document(plan: Plan) -> Document:
    """Lay out a plan."""
    chart = pareto_chart(plan)
    answer = [] if plan.answer is None else [plan.answer.sentence]
    verdict = [*answer, *plan.verdict][:3]
    sections = _sections(plan, chart)
    return Document(
        title=f"Plan for {plan.model.name}",
        subtitle=_what(plan),
        verdict=verdict,
        numbers=_numbers(plan),
        sections=sections,
        places=lambda: _places(plan, verdict, sections),
        warnings=[
            *([] if plan.search.complete else ["interrupted: this is the best so far"]),
            *plan.warnings,
        ],
        brief=_brief(plan),
    )


def _places(plan: Plan, verdict: Sequence[str], sections: Sequence[Section]) -> Links:
    """Return the row of the configuration that each sentence names, otherwise that of the winner."""
    find = Finder(sections)
    named = {one.best.name for one in plan.families} | {one.best.name for one in plan.precisions}
    winner = "" if plan.winner is None else plan.winner.name

    def place(line: str) -> list[Link]:
        name = max((name for name in named if name in line), key=len, default=winner)
        row = find.row(("families", "precisions"), {"configuration": name}) if name else []
        return row or find.section("families")

    return {line: place(line) for line in verdict}


def _sections(plan: Plan, chart: Figure | None) -> list[Section]:
    return [
        *config_section(plan.config),
        Section(
            anchor="families",
            title="The best of each family",
            lead="Best first; configurations that do not fit come last.",
            blocks=[_family_table(plan, plan.families, "families", "The best of each family", "family")],
        ),
        *([_recipes(plan)] if plan.recipes else []),
        *([_changes(plan)] if plan.changes else []),
        *([_precisions(plan)] if plan.precisions else []),
        Section(
            anchor="pareto",
            title="Memory and speed",
            detail=True,
            lead="No other configuration is both faster and smaller.",
            blocks=[
                *([Chart(name="pareto_front", title=_fastest(plan), figure=chart)] if chart else []),
                _point_table(plan, plan.pareto, "pareto", "Pareto front"),
            ],
        ),
        Section(
            anchor="search",
            title="Search",
            detail=True,
            blocks=[_facts(plan), Sentences(title="Assumptions", lines=plan.assumptions, style="list")],
        ),
    ]


def _brief(plan: Plan) -> list[Section]:
    """Return the short form: the best of each family, and single changes to the winner."""
    numbers = [
        c.sized("total_bytes", "memory\nat most", of="best.total_bytes"),
        c.time("step_ns", "step", of="best.step_ns"),
        c.number(
            "tokens_per_s_per_gpu", "tokens/s\nper GPU", lambda v: f"{v:,.0f}", "best.tokens_per_s_per_gpu"
        ),
    ]
    families = [c.text("family", of="name"), c.prose("configuration", of="best.name"), *numbers]
    changes = [c.text("change", of="name"), *numbers, c.prose("why")]
    note = f"limit {format_bytes(plan.given.limit_bytes)}: {plan.given.reserve_frac:.0%} stays free"
    best = c.table(
        "families", "The best of each family", families, plan.families, note=note, limit=6, noun="family"
    )
    changed = c.table("changes", "One option changed", changes, plan.changes, limit=5)
    return [*c.section("families", best.title, best), *c.section("changes", changed.title, changed)]


def _what(plan: Plan) -> str:
    given = plan.given
    network = "" if given.network is None else f", {given.network}"
    return (
        f"{format_count(plan.model.parameters)} parameters, {format_count(given.gpus)} x {given.hardware}"
        f"{network}, global batch {format_count(given.global_batch)} x {format_count(given.seq_len)} tokens"
    )


def _numbers(plan: Plan) -> list[KeyFigure]:
    point = plan.winner
    if point is None:
        return []
    figures = [
        KeyFigure(value=f"{point.tokens_per_s_per_gpu:,.0f}", label="tokens/s per GPU"),
        KeyFigure(value=format_ns(point.step_ns), label="per step"),
        KeyFigure(value=format_bytes(point.total_bytes), label="on each GPU at most"),
    ]
    if point.mfu is not None:
        figures.append(KeyFigure(value=format_frac(point.mfu), label="MFU"))
    if point.cost_per_billion_tokens is not None:
        unit = plan.given.currency or "(currency of --price)"
        cost = show_amount(point.cost_per_billion_tokens)
        figures.append(KeyFigure(value=cost, label=f"{unit} a billion tokens"))
    return figures


def _fastest(plan: Plan) -> str:
    if not plan.pareto:
        return "Pareto front"
    best = max(plan.pareto, key=lambda point: point.tokens_per_s)
    return f"The fastest makes {best.tokens_per_s:,.0f} tokens/s with {format_bytes(best.total_bytes)} a GPU"


def _numbers_of(plan: Plan, best: str) -> list[Column]:
    """Return the columns of a configuration's numbers; ``best``: where an item has it (``"best."``)."""

    def of(column: Callable[..., Column], key: str, label: str, *show: Any) -> Column:
        return column(key, label, *show, of=best + key)

    unit = plan.given.currency or "cost"
    cost = of(c.number, "cost_per_billion_tokens", f"{unit} per\n10^9\ntokens", show_amount)
    return [
        of(c.sized, "total_bytes", "memory\nat most"),
        of(c.time, "step_ns", "step"),
        of(c.frac, "exposed_frac", "exposed"),
        of(c.frac, "mfu", "MFU"),
        *([] if plan.given.price_per_gpu_hour is None else [cost]),
        of(c.number, "tokens_per_s_per_gpu", "tokens/s\nper GPU", lambda value: f"{value:,.0f}"),
        of(c.number, "gpu_hours_per_billion_tokens", "GPU-hours\nper 10^9\ntokens", show_amount),
    ]


def _best_table(
    plan: Plan, name: str, title: str, first: Column, items: Iterable[Any], note: str = ""
) -> Table:
    *numbers, gpu_hours = _numbers_of(plan, "best.")
    columns = [
        first,
        c.prose("configuration", of="best.name"),
        c.prose("why"),
        *numbers,
        c.text(
            "confirmed", "scored\nby", lambda confirmed: "engine" if confirmed else "search", "best.confirmed"
        ),
        *([] if name == "precisions" else [c.count("fitting")]),
        c.count("configurations", "tried"),
        gpu_hours,
    ]
    return c.table(name, title, columns, items, note=note, limit=_ROWS, noun=first.label)


def _family_table(plan: Plan, families: Sequence[PlanFamily], name: str, title: str, label: str) -> Table:
    limit = f"limit {format_bytes(plan.given.limit_bytes)}: {plan.given.reserve_frac:.0%} stays free"
    note = f"{limit}; {_OF_A_STEP}"
    return _best_table(plan, name, title, c.text(label, of="name"), families, note)


def _changes(plan: Plan) -> Section:
    return Section(
        anchor="changes",
        title="One option changed",
        lead="The winner with one option or mesh dimension changed, and the others optimized again.",
        blocks=[_family_table(plan, plan.changes, "changes", "One option changed", "change")],
        detail=True,
    )


def _precisions(plan: Plan) -> Section:
    named = c.prose("precision", of=lambda one: f"with {one.take}")
    table = _best_table(
        plan, "precisions", "The best in another precision", named, plan.precisions, _OF_A_STEP
    )
    return Section(
        anchor="precisions",
        title="Other precisions",
        lead="They change the training's numerics, so none is recommended unless --fix selects it.",
        blocks=[table],
        detail=True,
    )


def _point_table(plan: Plan, points: Sequence[PlanPoint], name: str, title: str) -> Table:
    memory, step, *rest = _numbers_of(plan, "")
    columns = [memory, step, c.prose("name", "configuration"), *rest]
    return c.table(name, title, columns, points, limit=_ROWS, noun="configuration")


def _recipes(plan: Plan) -> Section:
    blocks = [
        Sentences(
            title=recipe.tool,
            note=recipe.note,
            lines=recipe.text.splitlines(),
            style="code",
        )
        for recipe in plan.recipes
    ]
    return Section(anchor="recipes", title="Settings to paste", blocks=blocks)


def _facts(plan: Plan) -> Facts:
    search, given = plan.search, plan.given
    pairs = {
        "searched": f"{plural(search.configurations, 'configuration')}, "
        f"{format_count(search.fitting)} of them {'fits' if search.fitting == 1 else 'fit'}",
        "engine": f"{plural(search.engine_runs, 'execution')}; "
        f"{plural(search.error.configurations, 'configuration')} confirmed",
    }
    error = search.error
    if error.step_low_frac is not None and error.step_high_frac is not None:
        assert error.memory_low_frac is not None
        assert error.memory_high_frac is not None
        pairs["search against engine"] = (
            f"step {error.step_low_frac:+.1%} to {error.step_high_frac:+.1%}, "
            f"memory {error.memory_low_frac:+.1%} to {error.memory_high_frac:+.1%}"
        )
    if given.fixed:
        pairs["fixed"] = ", ".join(f"{name}={value}" for name, value in given.fixed.items())
    pairs["objective"] = given.objective
    return Facts(title="Search", pairs=pairs)
