"""The description of a run that has not happened: from options, files, a recorded run or a command.

It is checked before torch is imported, so that a wrong option is reported at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp2prof.errors import ModelError, UsageError
from fsdp2prof.estimators.config.catalog import builtin_config
from fsdp2prof.estimators.config.documents import read_text
from fsdp2prof.estimators.config.inputs import EstimateSpec, load_config, make_spec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.pipeline import LayersPerStage
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.config.stacks import stack_named, with_stack
from fsdp2prof.estimators.config.trainers import read_trainer_files
from fsdp2prof.estimators.models.build import builtin_of
from fsdp2prof.estimators.models.builtin_plan import outline_of
from fsdp2prof.estimators.of_run.policy import norm_of_run, values_of_run
from fsdp2prof.estimators.sharding.wrapping import EMBEDDING, HEAD, NORM
from fsdp2prof.estimators.techniques.registry import check_parallelism
from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.run.directory import open_run, read_sharded_manifests
from fsdp2prof.results.estimate import (
    ConfigRead,
)
from fsdp2prof.workflows.rehearsed import RehearsedRank, rehearsed

_BESIDE_A_TRACE = {"batch_size", "seq_len", "grad_accum", "param_dtype"}
"""Options of a policy that say something of an execution trace's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """A run as it was described: by options, a file, a recorded run."""

    values: Mapping[str, Any]
    """As :func:`~fsdp2prof.estimators.config.inputs.make_spec` takes them."""
    manifest: RankManifest | None
    """Of the recorded run, if there is one."""
    read: ConfigRead | None = None
    """How the trainer's configuration was read, if there is one."""
    given: frozenset[str] = frozenset()
    """Options given by the user, by name."""
    command: tuple[str, ...] = ()
    """Of the recorded run."""
    rehearsal: RehearsedRank | None = None
    """Allocations of the training command itself, if the estimate ran it."""
    older: tuple[Described, ...] = ()
    """The run under older software, which its files do not rule out."""

    @property
    def is_recorded_only(self) -> bool:
        """Whether only the recorded run determines the model."""
        return self.manifest is not None and "model" not in self.values

    def of_execution_trace(self, path: Path) -> Described:
        """Return the description with a file's operators as the model. Raises ``UsageError`` for options
        that they determine."""
        policy = self.values.get("policy", {})
        if idle := sorted(policy.keys() - _BESIDE_A_TRACE):
            raise UsageError(
                f"{idle[0]} would have no effect: the operators of {path.name} are used as recorded"
            )
        if not {"batch_size", "seq_len"} <= policy.keys():
            raise UsageError(f"{path.name} has no token count: add --batch-size and --seq-len of a rank")
        return replace(self, values={**self.values, "model": f"execution trace {path.name}"})

    def changed(self, values: Mapping[str, Any]) -> Described:
        """Return the description with other values of ``make_spec``; ``policy`` names only options that
        differ.

        Another mesh sets its own world size.
        """
        policy = {**self.values.get("policy", {}), **values.get("policy", {})}
        kept = {
            name: value for name, value in self.values.items() if "mesh" not in values or name != "world_size"
        }
        return replace(self, values={**kept, **values, "policy": policy})

    def under_older(self, spec: EstimateSpec) -> dict[str, EstimateSpec]:
        """Return the run under each older stack whose settings differ from those of ``spec``."""
        found: dict[str, EstimateSpec] = {}
        for described in self.older:
            other = described.spec()
            if other.policy.grad_accum == 1:
                other = replace(other, policy=replace(other.policy, sync=spec.policy.sync))
            if all(other.policy != one.policy for one in (spec, *found.values())):
                found[str(described.values["stack"])] = other
        return found

    def spec(self, **more: Any) -> EstimateSpec:
        """Build and check it; ``more`` overrides values. Raises ``ModelError`` and ``UsageError``."""
        if self.is_recorded_only:
            raise UsageError("--from-run needs the model too: a recorded run does not hold it; add --model")
        values = {**self.values, **{key: value for key, value in more.items() if value is not None}}
        if self.read is not None and "seq_len" not in values["policy"]:
            raise UsageError("no file has the sequence length: add --seq-len")
        head = _head_of(values.get("model"))
        layers = values.get("layers") or head.pop("layers", None)
        head.pop("layers", None)
        stages: LayersPerStage | None = values.get("stages")
        if stages is not None and "pp_schedule" not in self.given:
            decided = with_stack(values.get("stack"), values["policy"], pipelined=True)
            ends = decided.get("pp_end_layers", 0)
            schedule = stages.schedule(layers, ends)
            values = {**values, "policy": {**values["policy"], "pp_schedule": schedule}}
        read = {*head.get("own_kernels", ())} & values.get("policy", {}).keys() - self.given
        if self.read is not None and read:
            kept = {name: value for name, value in values["policy"].items() if name not in read}
            spec = make_spec({**values, "policy": kept}, **head)
            said = f"{' and '.join(sorted(read))} of the files are those of the model's own modules here"
            spec = replace(spec, notes=(*spec.notes, said))
        else:
            spec = make_spec(values, **head)
        _refuse_early(spec)
        return spec


def _refuse_early(spec: EstimateSpec) -> None:
    """Raise ``ModelError`` for options that a built-in model does not support, before torch is loaded."""
    if spec.model.kind == "builtin":
        check_parallelism(outline_of(builtin_of(spec.model)), spec.mesh, spec.policy)


_HUGGING_FACE_NAMES = {"tok_embeddings": EMBEDDING, "norm": NORM, "output": HEAD}
"""Modules of transformers' decoders, by the names that stacks have for them."""


_KERNELS = ("norm", "mlp")
"""Options for modules of the built-in models; other models have modules of their own."""


def _head_of(source: object) -> dict[str, Any]:
    """Whether a model ties head and embedding, the options for modules that it has of its own, and its
    names of modules that stacks wrap.

    Raises ``ModelError`` for an unknown built-in model.
    """
    if not source:
        return {}
    model = ModelSpec(source=str(source))
    if model.kind == "builtin":
        config = builtin_config(model.source)
        biased = config.experts is not None and config.experts.bias  # gpt-oss: another activation, clamped
        own = _KERNELS if config.family == "gpt" else _KERNELS[1:] if biased else ()
        return {"tied": config.tied, "own_kernels": own, "layers": config.layers}
    if model.kind == "factory":
        return {"tied": True, "own_kernels": _KERNELS}  # where its head is, is not known
    known = model.configuration()
    try:
        text = json.dumps(known) if isinstance(known, dict) else read_text(known)
        tied = '"tie_word_embeddings": false' not in text
        found = re.search(r'"num_hidden_layers": *(\d+)', text)  # of the text model, the first to have it
        layers = None if found is None else int(found[1])
        return {"tied": tied, "own_kernels": _KERNELS, "names": _HUGGING_FACE_NAMES, "layers": layers}
    except ValueError:
        return {}  # building the model says why


def describe(
    *,
    config: Path | None = None,
    from_run: Path | None = None,
    trainer_files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    command: Sequence[str] = (),
    given: Mapping[str, Any],
    policy: Mapping[str, Any],
) -> Described:
    """Combine the settings of a recorded run, a trainer's files, a file and options; later ones take
    precedence.

    ``command`` starts a training: it is run as one rank on tensors without data, and replaces them.
    ``given`` are values of ``make_spec``, ``policy`` options of ``PolicySpec``. Raises
    ``RunDirectoryError``, ``InputError`` and ``ModelError`` for unreadable input.
    """
    if command:
        _refuse_beside_a_command(
            {**given, "--from-run": from_run, "--config": config, "--from-config": trainer_files or None},
            command[0],
        )
        refuse_decided_by_a_script(policy)
    manifest = None if from_run is None else _manifest(from_run)
    of_file = {} if config is None else load_config(config)
    trainer = None
    if trainer_files:
        trainer = read_trainer_files(
            trainer_files,
            overrides=overrides,
            world_size=given.get("world_size"),
            stack=given.get("stack") or of_file.get("stack"),
            stated={*of_file.get("policy", {}), *policy},
        )
        of_file = {
            **trainer.values,
            **of_file,
            "policy": {**trainer.values["policy"], **of_file.get("policy", {})},
        }
        _refer_to_the_given_model(of_file, given.get("model"), trainer.values.get("model"))
    elif overrides:
        raise UsageError("--override changes a key of --from-config: name the file")
    has_model = "model" in of_file or "model" in given
    if trainer is not None and not has_model:
        raise ModelError(trainer.no_model)
    told = {**of_file.get("policy", {}), **policy}
    recorded = values_of_run(manifest, **micro_batches_of(told)) if manifest is not None and has_model else {}
    source = given.get("model") or of_file.get("model")
    if manifest is not None and source and ModelSpec(source=str(source)).kind == "builtin":
        norm = norm_of_run(manifest)
        recorded["policy"] |= {} if norm is None else {"norm": norm}
    merged = {**recorded.get("policy", {}), **told}
    rehearsal = rehearsed(command, given.get("world_size")) if command else None
    older, before = [], None if trainer is None else trainer.stack_before
    while before is not None:
        older.append(
            describe(
                config=config,
                from_run=from_run,
                trainer_files=trainer_files,
                overrides=overrides,
                given={**given, "stack": before},
                policy=policy,
            )
        )
        before = stack_named(before).before
    return Described(
        values={**recorded, **of_file, **given, "policy": merged},
        manifest=manifest if rehearsal is None else rehearsal.manifest,
        command=() if from_run is None else tuple(open_run(from_run).info.command),
        rehearsal=rehearsal,
        read=None if trainer is None else trainer.read,
        given=frozenset((*given, *policy)),
        older=tuple(older),
    )


def _refer_to_the_given_model(of_file: dict[str, Any], given: Any, named: Any) -> None:
    """Where a trainer's file names the trained model as its own reference, so does a model given instead."""
    if given is not None and named is not None and of_file["policy"].get("extra_model") == named:
        of_file["policy"]["extra_model"] = given


def refuse_decided_by_a_script(policy: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for options of a policy that a script which runs itself decides."""
    idle = sorted(policy.keys() - {"torch", "allocator"})
    if idle:
        raise UsageError(f"--{idle[0].replace('_', '-')} would have no effect: the script decides it")


def _refuse_beside_a_command(given: Mapping[str, Any], word: str) -> None:
    """Raise ``UsageError`` for options that the command determines."""
    idle = [name for name in given if given[name] is not None and name not in ("world_size", "hardware")]
    if idle:
        name = idle[0] if idle[0].startswith("-") else f"--{idle[0].replace('_', '-')}"
        raise UsageError(
            f"{name} would have no effect: {word!r} is read as a command; a model is --model {word}"
        )


def micro_batches_of(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The policy's settings of micro-batches, checked."""
    given = {name: policy[name] for name in ("grad_accum", "sync") if name in policy}
    PolicySpec.from_mapping(given)
    return given


def _manifest(run: Path) -> RankManifest:
    """Manifest of the lowest rank with parameter groups."""
    return next(manifest for manifest in read_sharded_manifests(run).values() if manifest.param_groups)
