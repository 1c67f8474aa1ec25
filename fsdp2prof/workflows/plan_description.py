"""What a plan takes from the description of a run, and the plan as a change to the file that describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.option import options_of
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.results.estimate import ConfigRead
from fsdp2prof.results.plan import Plan, PlanPoint, Recipe
from fsdp2prof.workflows.description import Described


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Part of a description that a plan uses: the model, the batch, and policy options that are not
    searched."""

    model: ModelSpec
    policy: PolicySpec
    gpus: int | None
    global_batch: int | None
    """Sequences of one optimizer step."""
    notes: Sequence[str] = ()
    """Given options that ``plan`` searches."""


_SEARCHED = {name: option.default for name, option in options_of(PolicySpec).items() if option.planned}
"""Options that a plan decides, as a search begins."""


def given_of(described: Described) -> Given:
    """Return the part of a description that a plan uses: the model, the batch, and policy options that are
    not searched.

    Raises the errors of ``Described.spec``. Without a mesh, a pipeline schedule is not checked, because
    the mesh is searched too.
    """
    checked = described
    if "mesh" not in described.values:
        checked = described.changed({"policy": {"pp_schedule": _SEARCHED["pp_schedule"]}})
    spec = checked.spec()
    policy = replace(spec.policy, **_SEARCHED, pp_runs=1)
    idle = sorted(described.given & (_SEARCHED.keys() - {"batch_size", "grad_accum"}))
    named = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
    notes = [f"searched, so not taken from the description: {named}; --fix keeps an option"] * bool(idle)
    if "mesh" not in described.values:
        size = described.values.get("world_size")
        return Given(model=spec.model, policy=policy, gpus=size, global_batch=None, notes=notes)
    mesh = spec.mesh
    ranks = mesh.dp_replicate * mesh.dp_shard
    batch = spec.policy.batch_size * spec.policy.grad_accum * ranks
    return Given(model=spec.model, policy=policy, gpus=mesh.world_size, global_batch=batch, notes=notes)


def in_the_file(made: Plan, described: Described, warnings: Sequence[str], notes: Sequence[str]) -> Plan:
    """Return a plan with its changes to the configuration it was made from."""
    made = replace(
        made, config=described.read, warnings=list(warnings), assumptions=[*notes, *made.assumptions]
    )
    if described.read is None or made.winner is None:
        return made
    text = _changes(described.read, made.winner)
    name = Path(described.read.files[0]).name
    change = Recipe(
        tool=f"change to {name}", text=text or "# nothing to change: the file has the winner's settings"
    )
    return replace(made, recipes=[change, *made.recipes])


def _changes(read: ConfigRead, winner: PlanPoint) -> str:
    """Lines of the file that change: its own keys where one key is one option, comments for the others."""
    dims = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    wanted: dict[str, Any] = {f"mesh {name}": getattr(winner.mesh, name) or 1 for name in dims}
    wanted |= {name: winner.policy[name] for name in ("batch_size", "ac", "reshard", "compile", "float8")}
    if not any("global" in row.key for row in read.rows if row.option == "grad_accum"):
        wanted["grad_accum"] = winner.policy["grad_accum"]
    lines = []
    for option, value in wanted.items():
        rows = [row for row in read.rows if row.option == option]
        text = "none" if value is None else "yes" if value is True else "no" if value is False else str(value)
        was = rows[0].became if rows else "1" if option.startswith("mesh") or option == "grad_accum" else None
        if was == text or (was is None and text in ("none", "no", "default")):
            continue
        one = rows[0] if len(rows) == 1 and text.isdecimal() else None
        if one is not None and one.value == "-1":
            continue  # it takes what the others leave
        said = f"# {option} = {text} (was {was})" if one is None else f"{one.key} = {text}  # was {one.value}"
        lines.append(said)
    return "\n".join(lines)
