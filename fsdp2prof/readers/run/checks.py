"""What types do not say of a run's documents: fields that belong together, and texts that are times."""

from __future__ import annotations

from datetime import datetime
from math import prod

from fsdp2prof.manifest import ParameterInfo, RankManifest, RecordingInfo, RunInfo

__all__ = ["check_document"]

_MOST_ELEMENTS = 1 << 56


def check_document(document: RunInfo | RankManifest | RecordingInfo) -> None:
    """Raise ``ValueError`` with the first thing that no recorder writes."""
    if isinstance(document, RunInfo):
        _check_times(document)
        return
    if isinstance(document, RecordingInfo):
        return
    for group in document.param_groups:
        names = group.mesh.dim_names
        if names is not None and len(names) != len(group.mesh.shape):
            raise ValueError(f"a mesh of {len(group.mesh.shape)} dimensions has {len(names)} names")
        if not group.parameters:
            raise ValueError(f"parameter group {group.fqn!r} has no parameters")
        for parameter in group.parameters:
            _check_parameter(parameter)


def _check_times(info: RunInfo) -> None:
    for text in (info.started_at, info.finished_at):
        if text and datetime.fromisoformat(text).tzinfo is None:
            raise ValueError(f"{text} has no time zone")


def _check_parameter(parameter: ParameterInfo) -> None:
    shapes = (parameter.global_shape, parameter.local_shape, parameter.padded_local_shape)
    if not parameter.global_shape or len(set(map(len, shapes))) > 1:
        raise ValueError(
            f"{parameter.fqn} has shapes of {', '.join(str(len(one)) for one in shapes)} dimensions"
        )
    for shape in shapes:
        if prod(shape) > _MOST_ELEMENTS:
            raise ValueError(f"no tensor has the shape {shape}")
    if len(parameter.all_gather_dtypes) != len(parameter.all_gather_numels):
        raise ValueError(f"{parameter.fqn} is not gathered in as many sizes as dtypes")
