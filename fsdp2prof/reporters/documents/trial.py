"""Document of a trial: each setting's gain in the running training, next to its prediction."""

from __future__ import annotations

from fsdp2prof.reporters import columns as c
from fsdp2prof.reporters.document import Block, Document, KeyFigure, Section, Sentences, Table
from fsdp2prof.reporters.documents import builds
from fsdp2prof.reporters.formats import show_ns
from fsdp2prof.results.trial import TrialResult
from fsdp2prof.units import format_bytes, plural

_OUTCOMES = {"faster": "faster", "slower": "slower", "not_distinguishable": "not distinguishable"}


@builds(TrialResult)
def trial_document(result: TrialResult) -> Document:
    """Lay out a trial."""
    figures = []
    if result.step_ns is not None:
        figures.append(
            KeyFigure(value=show_ns(result.step_ns), label="step with the script's settings, median")
        )
    if result.peak_bytes is not None:
        figures.append(
            KeyFigure(value=format_bytes(result.peak_bytes), label="peak with the script's settings")
        )
    return Document(
        title=f"Tried in {result.path}",
        subtitle=f"{plural(len(result.ranks), 'rank')}, {plural(result.rounds, 'round')}, seed {result.seed}",
        numbers=figures,
        sections=trial_section(result),
    )


def trial_section(result: TrialResult, *, brief: bool = False) -> list[Section]:
    """Return the section of a trial; ``brief`` is only its table."""
    blocks = _blocks(result)[:1] if brief else _blocks(result)
    return c.section("tried", "Measured in the running job", *blocks)


def _blocks(result: TrialResult) -> list[Block]:
    blocks: list[Block] = [_table(result)] if result.tried else []
    unpredicted = [
        f"{one.change}: {one.predicted_reason}" for one in result.tried if one.predicted_reason is not None
    ]
    if unpredicted:
        blocks.append(Sentences(title="Without a prediction", lines=unpredicted, style="list"))
    if result.left_out:
        lines = [f"{one.change}: {one.reason}" for one in result.left_out]
        blocks.append(Sentences(title="Not tried", lines=lines, style="list"))
    ended = result.ended or "the training ended during the trial"
    restored = "the script's own settings were back" if result.restored else "settings were not restored"
    blocks.append(Sentences(title="End of the trial", lines=[f"{ended}; {restored}"], style="list"))
    return blocks


def _table(result: TrialResult) -> Table:
    columns = [
        c.text("change"),
        c.text("outcome", show=_OUTCOMES.__getitem__),
        c.ms("gained_ns", "gained\nms"),
        c.ms("low_ns", "95 %\nfrom"),
        c.ms("high_ns", "95 %\nto"),
        c.frac("gained_frac", "of the\nstep"),
        c.ms("predicted_ns", "predicted\nms"),
        c.ms("least_predicted_ns", "least\nstep"),
        c.ms("most_predicted_ns", "most\nstep"),
        c.sized("added_bytes", "memory"),
        *([c.number("rounds")] if any(one.rounds != result.rounds for one in result.tried) else []),
        c.number("recording"),
    ]
    note = "ms per step saved against the script's settings; median of pairs of blocks"
    title = "Measured in the running job"
    return c.table("tried", title, columns, result.tried, note=note, noun="candidate")
