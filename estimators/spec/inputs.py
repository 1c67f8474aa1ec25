"""An estimate's whole input from plain values, a YAML or TOML file, or a recorded run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fsdp2prof.errors import InputError, ModelError
from fsdp2prof.estimators.spec.documents import parse_toml, parse_yaml, read_text
from fsdp2prof.estimators.spec.hardware import HardwareSpec
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.model import ModelSpec
from fsdp2prof.estimators.spec.policy import PolicySpec, Reshard
from fsdp2prof.manifest import ParamGroupInfo, RankManifest

__all__ = ["EstimateSpec", "load_config", "make_spec", "values_of_run"]

_KEYS = ("model", "layers", "mesh", "hardware", "policy")


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateSpec:
    """Everything an estimate is made from."""

    model: ModelSpec
    mesh: MeshSpec
    policy: PolicySpec
    hardware: HardwareSpec | None = None


def load_config(path: Path) -> dict[str, Any]:
    """Read a YAML or TOML file with ``model``, ``layers``, ``mesh``, ``hardware`` and a ``policy`` table.

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


def make_spec(values: Mapping[str, Any]) -> EstimateSpec:
    """Build and validate an estimate's input from the keys of :func:`load_config`.

    ``mesh`` is text or a table; without it there is one rank. Raises ``ModelError`` for anything wrong.
    """
    if not values.get("model"):
        raise ModelError("no model: name a built-in, a config.json or package.module:factory with --model")
    mesh = values.get("mesh", "dp_shard=1")
    hardware = values.get("hardware")
    return EstimateSpec(
        model=ModelSpec(source=str(values["model"]), layers=values.get("layers")),
        mesh=_mesh_of_table(mesh) if isinstance(mesh, Mapping) else MeshSpec.parse(str(mesh)),
        policy=PolicySpec.from_mapping(values.get("policy", {})),
        hardware=None if hardware is None else HardwareSpec.parse(str(hardware)),
    )


def values_of_run(manifest: RankManifest) -> dict[str, Any]:
    """What a recorded rank says of its mesh and policy, as the values of :func:`make_spec`.

    The model itself is not in a manifest. Raises ``ModelError`` for a policy that differs between groups in
    a way that no ``PolicySpec`` says.
    """
    if not manifest.param_groups:
        raise ModelError(f"rank {manifest.rank} recorded no FSDP parameter group: nothing to estimate")
    groups = [group for group in manifest.param_groups if group.root == manifest.param_groups[0].root]
    first = groups[0]
    inner = [group for group in groups if group.fqn]
    policy: dict[str, Any] = {
        "wrap": tuple(group.fqn.replace(", ", "+") for group in inner) or ("root",),
        "reshard": _reshard_of(inner, groups),
        "param_dtype": _same(groups, "param_dtype"),
        "reduce_dtype": _same(groups, "reduce_dtype"),
        "orig_dtype": first.parameters[0].dtype,
        "offload": _same(groups, "offload"),
        "separate_reduce_scatter_group": first.reduce_scatter_group != first.shard_group,
        "grad_accum": manifest.micro_batches or 1,
    }
    if manifest.gradient_syncs and manifest.gradient_syncs == manifest.micro_batches:
        policy["sync"] = "each"
    root = next((group for group in groups if not group.fqn), None)
    if root is not None and isinstance(root.reshard_after_forward, bool):
        policy["reshard_root"] = root.reshard_after_forward
    if manifest.optimizers:
        policy["optimizer"] = _optimizer_of(manifest)
    mesh = {"dp_replicate": first.replicate_world_size, "dp_shard": first.shard_world_size}
    return {"mesh": mesh, "policy": policy}


def _mesh_of_table(table: Mapping[str, Any]) -> MeshSpec:
    known = {field.name for field in fields(MeshSpec)}
    unknown = [str(name) for name in table if name not in known]
    if unknown:
        raise ModelError(f"mesh: no dimension {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return MeshSpec(**table)


def _same(groups: list[ParamGroupInfo], name: str) -> Any:
    values = {getattr(group, name) for group in groups}
    if len(values) > 1:
        raise ModelError(f"the run's groups differ in {name} ({values}): one policy for all is modelled")
    return values.pop()


def _reshard_of(inner: list[ParamGroupInfo], groups: list[ParamGroupInfo]) -> Reshard:
    values = [group.reshard_after_forward for group in inner or groups]
    if all(value is True for value in values):
        return "always"
    if all(value is False for value in values):
        return "never"
    if values[-1] is False and all(value is True for value in values[:-1]):
        return "torchtitan"
    sizes = set(values)
    if len(sizes) == 1:
        return sizes.pop()
    raise ModelError("the run reshards its groups differently: one policy for all is modelled")


def _optimizer_of(manifest: RankManifest) -> str:
    optimizer = manifest.optimizers[0]
    name = optimizer.class_name.rpartition(".")[2].lower()
    momentum = optimizer.defaults.get("momentum", "0")
    return "sgd-momentum" if name == "sgd" and momentum not in ("0", "0.0") else name
