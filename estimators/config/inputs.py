"""An estimate's whole input from plain values or a YAML or TOML file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fsdp2prof.errors import InputError, ModelError
from fsdp2prof.estimators.config.documents import parse_toml, parse_yaml, read_text
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.stacks import stack_notes, with_stack

_KEYS = ("model", "layers", "mesh", "hardware", "stack", "policy")


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateSpec:
    """Everything an estimate is made from."""

    model: ModelSpec
    mesh: MeshSpec
    policy: PolicySpec
    hardware: HardwareSpec | None = None
    notes: tuple[str, ...] = ()
    """Assumptions that the input adds to an estimate."""


def load_config(path: Path) -> dict[str, Any]:
    """Read a YAML or TOML file with the keys ``model``, ``layers``, ``mesh``, ``hardware``, ``stack`` and a
    ``policy`` table.

    Raises ``InputError`` if it cannot be read or parsed, or has other keys.
    """
    parse = parse_toml if path.suffix == ".toml" else parse_yaml
    try:
        values = parse(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: not a table of {', '.join(_KEYS)}")
    unknown = [str(key) for key in values if key not in _KEYS]
    if unknown:
        raise InputError(f"{path}: unknown key {unknown[0]!r}; there are {', '.join(_KEYS)}")
    if not isinstance(values.get("policy", {}), dict):
        raise InputError(f"{path}: policy is not a table")
    return values


def make_spec(
    values: Mapping[str, Any],
    *,
    tied: bool = False,
    own_kernels: Collection[str] = (),
    names: Mapping[str, str] | None = None,
) -> EstimateSpec:
    """Build and validate an estimate's input from the keys of :func:`load_config`.

    ``mesh`` is text or a table; without it FSDP shards over ``world_size`` ranks, by default one. ``tied``
    and ``names`` describe the model, as ``with_stack`` takes them; a stack's options
    ``own_kernels``, for parts that the model has of its own, are not used. Raises ``ModelError``.
    """
    if not values.get("model"):
        raise ModelError("no model: name a built-in, a config.json or package.module:factory with --model")
    hardware, world_size = values.get("hardware"), values.get("world_size")
    mesh = values.get("mesh", "dp_shard=1" if world_size is None else "dp_shard=-1")
    sizes = _mesh_of_table(mesh) if isinstance(mesh, Mapping) else MeshSpec.parse(str(mesh), world_size)
    own = values.get("policy", {})
    policy = with_stack(values.get("stack"), own, tied=tied, pipelined=sizes.pp > 1, names=names or {})
    left_out = {*own_kernels} - own.keys()
    policy = {option: value for option, value in policy.items() if option not in left_out}
    notes = stack_notes(values.get("stack"), {**own, **dict.fromkeys(left_out)})
    if sizes.pp > 1 and "reshard" not in own:
        policy["reshard"] = "never"
        policy.pop("reshard_root", None)
        notes.append("reshard=never: the default with pp, as stages keep parameters between micro-batches")
    return EstimateSpec(
        model=ModelSpec(source=str(values["model"]), layers=values.get("layers")),
        mesh=sizes,
        policy=PolicySpec.from_mapping(policy),
        hardware=None if hardware is None else HardwareSpec.parse(str(hardware)),
        notes=tuple(notes),
    )


def _mesh_of_table(table: Mapping[str, Any]) -> MeshSpec:
    known = {field.name for field in fields(MeshSpec)}
    unknown = [str(name) for name in table if name not in known]
    if unknown:
        raise ModelError(f"mesh: no dimension {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return MeshSpec(**table)
