"""A run as described by the trainer's own configuration files: ``--from-config``.

One reader per format turns keys into options (:mod:`.reading`); ``defaults.yaml`` holds the trainers'
defaults for keys that a file does not give. A format is recognized by its keys, not by the name of a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2prof.errors import InputError, ModelError
from fsdp2prof.estimators.config.documents import parse_toml, parse_yaml, read_text
from fsdp2prof.estimators.config.stacks import stack_named
from fsdp2prof.estimators.config.trainers.automodel import read_automodel
from fsdp2prof.estimators.config.trainers.axolotl import read_axolotl
from fsdp2prof.estimators.config.trainers.hugging_face import read_hugging_face
from fsdp2prof.estimators.config.trainers.llama_factory import read_llama_factory, read_llama_factory_v1
from fsdp2prof.estimators.config.trainers.prime_rl import read_prime_rl
from fsdp2prof.estimators.config.trainers.reading import Reading, flattened, format_named
from fsdp2prof.estimators.config.trainers.registry import is_registry, parse_registry
from fsdp2prof.estimators.config.trainers.torchtitan import read_torchtitan
from fsdp2prof.estimators.config.trainers.torchtune import read_torchtune
from fsdp2prof.estimators.config.trainers.veomni import read_veomni
from fsdp2prof.results.estimate import ConfigRead, ConfigRow

_READERS: Mapping[str, Callable[[Reading], None]] = {
    "torchtitan": read_torchtitan,
    "torchtitan-registry": read_torchtitan,
    "prime-rl": read_prime_rl,
    "torchtune": read_torchtune,
    "automodel": read_automodel,
    "veomni": read_veomni,
    "llama-factory": read_llama_factory,
    "llama-factory-v1": read_llama_factory_v1,
    "axolotl": read_axolotl,
    "huggingface": read_hugging_face,
}
_ACCELERATE = "accelerate"
_PRIMUS_MODEL = re.compile(r"(llama3|llama4|qwen3|deepseek_v3|gpt_oss)(?:\.\d)?_([\w.]+?)\.yaml")
"""Primus' file of a model: torchtitan's name for its family, and a flavor."""
_KNOWN = (
    "torchtitan, prime-rl, torchtune, NeMo Automodel, VeOmni, LLaMA-Factory, axolotl, TrainingArguments, "
    "TRL, accelerate"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRun:
    """The run that configuration files describe."""

    values: dict[str, Any]
    """As :func:`~fsdp2prof.estimators.config.inputs.make_spec` takes them."""
    read: ConfigRead
    """The keys that were read and the options they became."""
    no_model: str
    """The error to report if no other source names the model either."""
    stack_before: str | None = None
    """Older software that the run may as well be of."""


def read_trainer_files(
    paths: Sequence[Path],
    *,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    stack: str | None = None,
    stated: Collection[str] = (),
) -> TrainerRun:
    """Read a run from one file, or several of one trainer; a later file wins.

    ``overrides`` are ``key=value`` with the trainer's own keys; ``stated`` are options of the policy that
    are given in addition to the files, which are then not reported as missing. Raises ``InputError`` for a
    file that cannot be read or is of no known trainer, ``ModelError`` for a setting that is not modelled.
    """
    documents = [(path, *_parsed(path)) for path in paths]
    kinds = [kind for _, kind, _ in documents if kind != _ACCELERATE]
    if len(set(kinds)) > 1:
        raise InputError(f"--from-config: files of different trainers: {', '.join(sorted(set(kinds)))}")
    kind = kinds[0] if kinds else "huggingface"
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for path, own, table in documents:
        prefix = _ACCELERATE if own == _ACCELERATE else ""
        flat = flattened(table, prefix)
        values |= flat
        places |= dict.fromkeys(flat, path.name)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(
                f"--override {text!r} is not KEY=VALUE; write a key of the file, as training.seq_len=4096"
            )
        values[key.strip()] = parse_yaml(value)
        places[key.strip()] = "--override"
    declared = format_named(kind)
    run = Reading(
        format=declared,
        values=values,
        places=places,
        world_size=world_size,
        stack=stack or declared.stack,
        stack_is_stated=stack is not None,
        stated=stated,
    )
    run.judge_unmodelled()
    _READERS[kind](run)
    return _result(run, paths)


def _result(run: Reading, paths: Sequence[Path]) -> TrainerRun:
    harmless, unknown = run.unused()
    if run.stack_before is not None:
        run.open.append(
            f"the date of the software is in no file: {run.stack} is estimated; "
            f"--stack {run.stack_before} is {stack_named(run.stack_before).what}"
        )
    values: dict[str, Any] = {"mesh": run.mesh, "policy": run.policy, "stack": run.stack}
    if run.model is not None:
        values["model"] = run.model
    if run.layers is not None:
        values["layers"] = run.layers
    if run.stages is not None:
        values["stages"] = run.stages
    read = ConfigRead(
        format=run.format.title,
        files=[str(path) for path in paths],
        stack=run.stack,
        rows=[
            ConfigRow(
                key=found.key,
                value=_shown(found.value),
                option=option,
                became=became,
                source=found.source,
                given=found.given,
            )
            for found, option, became in run.rows
        ],
        without_effect=harmless,
        not_known=unknown,
        misspelt=run.misspelt(unknown),
        notes=run.notes,
        open=run.open,
    )
    return TrainerRun(values=values, read=read, no_model=run.no_model, stack_before=run.stack_before)


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)


def _parsed(path: Path) -> tuple[str, Mapping[str, Any]]:
    """The format of a file, by its keys, and its values."""
    function = None
    name = str(path)
    if ".py:" in name:
        name, _, function = name.rpartition(":")
    file = Path(name)
    try:
        text = read_text(file)
        if file.suffix == ".py":
            if not is_registry(text):
                raise ValueError("is not a torchtitan registry: no function in it returns a Trainer.Config")
            return "torchtitan-registry", parse_registry(text, file, function)
        values = parse_toml(text) if file.suffix == ".toml" else parse_yaml(text)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    except ModelError as error:
        raise InputError(str(error)) from None
    if not isinstance(values, Mapping):
        raise InputError(f"{path}: not a table of keys")
    if "zero_optimization" in values or "train_micro_batch_size_per_gpu" in values:
        raise InputError(f"{path}: DeepSpeed's configuration; an estimate is of FSDP2 (fsdp_version: 2)")
    values = _within_primus(values)
    kind = _kind_of(values)
    if kind == "prime-rl" and file.suffix != ".toml":
        kind = None
    if kind is None:
        keys = ", ".join(map(str, list(values)[:6]))
        raise InputError(f"{path}: not the configuration of a known trainer ({_KNOWN}); its keys are {keys}")
    return kind, values


def _within_primus(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return torchtitan's tables of a Primus experiment: what it overrides, and the model by its file."""
    modules = values.get("modules")
    trainer = modules.get("pre_trainer") if isinstance(modules, Mapping) else None
    if not isinstance(trainer, Mapping) or trainer.get("framework") != "torchtitan":
        return values
    tables = trainer.get("overrides")
    own = dict(tables) if isinstance(tables, Mapping) else {}
    named = _PRIMUS_MODEL.fullmatch(str(trainer.get("model", "")))
    model = {"name": named[1], "flavor": named[2].upper()} if named else {}
    more = own.get("model")
    return {**own, "model": model | dict(more) if isinstance(more, Mapping) else model}


def _kind_of(values: Mapping[str, Any]) -> str | None:
    """Which trainer's keys these are."""
    keys = {str(key) for key in values}

    def table(name: str) -> Mapping[str, Any]:
        found = values.get(name)
        return found if isinstance(found, Mapping) else {}

    if "flavor" in table("model") or (
        "training" in keys and keys & {"parallelism", "job", "activation_checkpoint"}
    ):
        return "torchtitan"
    if any("_component_" in table(name) for name in ("model", "tokenizer", "policy_model")):
        return "torchtune"
    if "step_scheduler" in keys or str(table("model").get("_target_", "")).startswith("nemo_automodel"):
        return "automodel"
    if "train" in keys and keys & {"model", "data"} and isinstance(values["train"], Mapping):
        return "veomni"
    if keys & {"orchestrator", "trainer"} or (
        table("model")
        and keys & {"data", "optim", "max_steps", "max_concurrent_runs"}
        and not keys & {"train", "step_scheduler"}
    ):
        return "prime-rl"
    if "rollouts_per_example" in keys and keys & {"environment", "sampling", "seq_len"}:
        return "prime-rl"  # the orchestrator's file, which has the length of the trainer's sequences
    if "base_model" in keys:
        return "axolotl"
    if isinstance(values.get("model"), str) and keys & {
        "dist_config",
        "kernel_config",
        "cutoff_len",
        "micro_batch_size",
    }:
        return "llama-factory-v1"
    if "model_name_or_path" in keys and keys & {"finetuning_type", "stage", "template", "cutoff_len"}:
        return "llama-factory"
    if keys & {"distributed_type", "compute_environment", "num_processes"}:
        return _ACCELERATE
    if keys & {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "model_name_or_path",
        "gradient_checkpointing",
    }:
        return "huggingface"
    return None
