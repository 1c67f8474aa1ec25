"""The contents of a trainer's configuration, as rows: the key, its value, the option that it became.

A reader of a format asks a :class:`Reading` for keys and sets options from them. If a file does not give a
key, the trainer's own default applies, with the line of the trainer's code that contains it
(``defaults.yaml``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NoReturn

import msgspec

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.documents import packaged
from fsdp2prof.estimators.config.pipeline import SCHEDULES, LayersPerStage
from fsdp2prof.estimators.config.stacks import stack_named

_RESEMBLES = 0.75
"""Likeness of two names (``difflib``) from which one may be a misspelling of the other."""
_SCHEDULES = {
    rule.torchtitan_name.lower(): f"{word}:2" if word in ("interleaved", "bfs", "zb1p") else word
    for word, rule in SCHEDULES.items()
}
"""By torch's name in small letters; where a file does not count a rank's stages it has two."""


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer's configuration format: its defaults for keys that a file does not give."""

    title: str
    stack: str
    """The software that is assumed where ``--stack`` names no other."""
    model: tuple[str, ...] = ()
    """Keys that name the model, the newest first."""
    mesh: dict[str, tuple[str, ...]] = {}
    """Dimension -> the keys of its size, the newest first."""
    options: dict[str, tuple[str, ...]] = {}
    """Option -> how its value is read (:data:`_READ_AS`), then its keys, the newest first."""
    defaults: dict[str, tuple[Any, str]] = {}
    """Key -> the trainer's default, and where its code says it."""
    no_effect: tuple[str, ...] = ()
    """Keys, as patterns, that change no estimate: logging, data sets, learning rates, checkpoints' times."""
    refused: dict[str, str] = {}
    """Keys, as patterns, that make another training than an estimate can be of -> why."""
    bounded: dict[str, str] = {}
    """Keys, as patterns, that are left out of an estimate -> the effect of leaving them out."""


@lru_cache(maxsize=1)
def _formats() -> dict[str, Format]:
    return packaged("fsdp2prof.estimators.config.trainers", "defaults.yaml", dict[str, Format])


def format_named(name: str) -> Format:
    """The declaration of a format."""
    return _formats()[name]


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a key, from a file or the trainer's default."""

    key: str
    value: Any
    source: str
    """The file, or the line of the trainer's code."""
    given: bool = True
    """Whether a file or ``--override`` says it."""

    def __bool__(self) -> bool:
        return bool(self.value)

    def number(self, least: int = 0) -> int:
        """The value as a whole number. Raises ``ModelError``."""
        try:
            number = int(self.value)
        except (TypeError, ValueError, OverflowError):
            number = least - 1
        if isinstance(self.value, bool) or number < least:
            raise ModelError(f"{self.source}: {self.key} = {self.value!r} is not a number from {least} on")
        return number

    def names(self) -> list[str]:
        """The value as a list of names; empty for none. Raises ``ModelError``."""
        if self.value is None:
            return []
        if not isinstance(self.value, list | tuple) or not all(isinstance(one, str) for one in self.value):
            raise ModelError(f"{self.source}: {self.key} = {self.value!r} is not a list of names")
        return list(self.value)

    def word(self) -> str:
        """The value as a word in small letters; empty for none."""
        return "" if self.value is None else str(self.value).strip().lower()

    @property
    def is_absent(self) -> bool:
        """Whether no file has the key, or one says that it has no value."""
        return self.word() in ("", "none", "null")


def is_on(found: Value) -> bool:
    """Whether a key is switched on, written as a boolean or as a word."""
    return found.value is True or found.word() in ("true", "yes", "1", "on")


_READ_AS: Mapping[str, Callable[[Value], Any]] = {
    "value": lambda found: found.value,
    "number": lambda found: found.number(1),
    "switch": is_on,
    "on": lambda found: is_on(found) or None,
    "fused": lambda found: "fused" if is_on(found) else None,
    "blocks": lambda found: "full" if is_on(found) else "none",
    "always": lambda found: "always" if is_on(found) else "never",
    "positive": lambda found: not found.is_absent and float(found.value) > 0,
}
"""Ways to read an option; one that gives None sets nothing."""


@dataclass(kw_only=True, slots=True)
class Reading:
    """One run as its configuration is read."""

    format: Format
    values: Mapping[str, Any]
    """Dotted key -> value of all files."""
    places: Mapping[str, str]
    """Dotted key -> the file that says it, or ``--override``."""
    world_size: int | None
    model: str | None = None
    layers: int | None = None
    no_model: str = (
        "no file names the model: add the training's file with another --from-config, or add --model"
    )
    """The note to add if no other source names it either."""
    mesh: dict[str, int] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    stages: LayersPerStage | None = None
    """The stages of its pipeline, where the file has their length."""
    stack: str
    """The run's software."""
    stack_is_stated: bool = False
    """Whether the user gave it; it then overrides the keys."""
    is_recent: bool = False
    """Whether a key or value rules out the software of the time before."""
    stated: Collection[str] = ()
    """Options of the policy that are stated beside the files."""
    rows: list[tuple[Value, str, str]] = field(default_factory=list)
    """The value that was read, the option it became, and the value there."""
    notes: list[str] = field(default_factory=list)
    """Contradictions, sections without effect, and settings that are not modelled."""
    open: list[str] = field(default_factory=list)
    """Settings that no file gives and that the answer depends on."""
    _read: set[str] = field(default_factory=set)

    def get(self, *keys: str) -> Value:
        """The first of several names of one key that a file gives, otherwise the trainer's default,
        otherwise None."""
        self._read.update(keys)
        for key in keys:
            if key in self.values:
                return Value(key, self.values[key], self.places[key])
        for defaults in (stack_named(self.stack).defaults, self.format.defaults):
            for key in keys:
                if key in defaults:
                    return Value(key, *defaults[key], given=False)
        return Value(keys[0], None, "", given=False)

    def take_stack(self, name: str) -> None:
        """Use the software that the keys imply, unless the user gave one."""
        if not self.stack_is_stated:
            self.stack = name

    @property
    def stack_before(self) -> str | None:
        """Older software that the run may as well be of."""
        return None if self.stack_is_stated or self.is_recent else stack_named(self.stack).before

    def read_declared(self, **sizes: Value) -> None:
        """Take the model, the mesh and the options whose keys the format declares.

        ``sizes`` are dimensions of the mesh that no single key gives. Raises ``ModelError``.
        """
        name = self.get(*self.format.model) if self.format.model else None
        if name is not None and isinstance(name.value, str):
            self.set_model(name.value, name)
        self.set_mesh({dim: self.get(*keys) for dim, keys in self.format.mesh.items()} | sizes)
        for option, (way, *keys) in self.format.options.items():
            found = self.get(*keys)
            became = _READ_AS[way](found)
            if became is not None:
                self.set(option, became, found)
            elif way == "value":
                self.missing(option, found)

    def section(self, *prefixes: str) -> dict[str, Any]:
        """Every key below a prefix, without it; reading them is left to the caller."""
        found: dict[str, Any] = {}
        for prefix in prefixes:
            found |= {
                key[len(prefix) + 1 :]: value
                for key, value in self.values.items()
                if key.startswith(f"{prefix}.")
            }
        return found

    def has(self, *prefixes: str) -> bool:
        """Whether a file has one of these keys, or a key below it."""
        return any(key == one or key.startswith(f"{one}.") for key in self.values for one in prefixes)

    def set(self, option: str, value: Any, *read: Value) -> None:
        """Set an option from the value read; a key that is absent everywhere sets nothing."""
        self.policy[option] = value
        self._row(option, value, read)

    def says(self, option: str, value: Any, *read: Value) -> None:
        """Note a key's meaning if the stack decides the option, or if there is no option."""
        self._row(option, value, read)

    def ask(self, option: str, unknown: str, value: str = "") -> None:
        """Report a setting that no file gives and its option; nothing if it is given."""
        if option not in self.stated:
            self.open.append(f"{unknown}: add --{option.replace('_', '-')}{value}")

    def missing(self, option: str, read: Value) -> None:
        """Say that no file gives a key for which the trainer has no default; the option keeps its own."""
        self.ask(
            option,
            f"{read.key} is in no file, and the trainer's code has none; the estimate takes its own default",
        )

    def set_model(self, source: str, *read: Value, layers: int | None = None) -> None:
        """Name the model."""
        self.model, self.layers = source, layers
        self._row("model", source, read)

    def set_mesh(self, read: Mapping[str, Value]) -> None:
        """Set the mesh; a ``dp_shard`` of -1, or none, is the rest of the world size.

        Raises ``ModelError`` if the world size is needed but not known, or does not divide.
        """
        sizes = {
            name: (-1 if name == "dp_shard" else 1) if found.is_absent else found.number(-1)
            for name, found in read.items()
        }
        rest = [name for name, size in sizes.items() if size < 1]
        others = 1
        for name, size in sizes.items():
            others *= size if size >= 1 and name != "ep" else 1
        if rest and self.world_size is None:
            found = read[rest[0]]
            why = "" if found.is_absent else f", and {found.key} depends on it"
            raise ModelError(f"the number of ranks is in no file{why}: add --world-size")
        if rest:
            assert self.world_size is not None
            if self.world_size % others:
                raise ModelError(
                    f"--world-size {self.world_size} is not a multiple of {others}, the product of the other "
                    "dimensions"
                )
            sizes |= dict.fromkeys(rest, 1) | {rest[-1]: self.world_size // others}
        self.mesh = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        for name, found in read.items():
            if not found.is_absent and (found.given or sizes[name] > 1):
                self._row(f"mesh {name}", sizes[name], (found,))
        total = 1
        for name, size in sizes.items():
            total *= size if name != "ep" else 1
        if self.world_size is not None and total != self.world_size:
            keys = ", ".join(found.key for found in read.values() if found.given)
            raise ModelError(f"{keys}: a mesh of {total} ranks, and the world has {self.world_size}")

    def set_world(self, read: Value, ranks_of_one: int = 1) -> None:
        """Take the world size from a file; ``--world-size`` goes first, and a difference is said."""
        if read.value is None:
            return
        size = read.number(1) * ranks_of_one
        if self.world_size is None:
            self.world_size = size
            self.says("world size", size, read)
        elif size != self.world_size:
            self.notes.append(
                f"{read.key} = {read.value} makes a world of {size}: --world-size {self.world_size} is taken"
            )

    def set_schedule(self, read: Value, of_stage: Value, rounding: str | None = None) -> None:
        """The schedule of a pipeline by torch's name for it, whose stages have ``of_stage`` layers.

        ``rounding`` is that of the number of stages, as in ``LayersPerStage``.
        Raises ``ModelError`` for a schedule that is not modelled.
        """
        word = _SCHEDULES.get(read.word().replace("_", ""))
        if word is None:
            self.refuse(read, f"this schedule is not modelled; {', '.join(_SCHEDULES)} are")
        kind, counted, _ = word.partition(":")
        if not counted or of_stage.value is None:
            self.set("pp_schedule", word, read)
            return
        self.policy["pp_schedule"] = word
        self.says("pp_schedule", f"{kind}, stages of {of_stage.value}", read, of_stage)
        self.stages = LayersPerStage(
            word=kind,
            layers=of_stage.number(1),
            ranks=self.mesh["pp"],
            said=f"{of_stage.source}: {of_stage.key} = {of_stage.value}",
            rounding=rounding,
        )

    def accumulate(self, whole: Value, local: int, ranks: int) -> None:
        """Micro-batches of a step from the global batch; none given is one.

        Raises ``ModelError`` for a global batch that the ranks do not divide.
        """
        if whole.value is None or whole.number(-1) < 1:
            return
        count, left = divmod(whole.number(1), local * ranks)
        if left or not count:
            raise ModelError(
                f"{whole.source}: {whole.key} = {whole.value} is not a multiple of {local * ranks} "
                f"({local} on each of {ranks} data-parallel ranks)"
            )
        self.set("grad_accum", count, whole)

    def run_schedule(self, micro_batches: int, *reads: Value) -> None:
        """A pipeline's schedule runs on so many micro-batches at a time; a step runs it again for more.

        Raises ``ModelError`` for a step that is not a number of whole runs.
        """
        runs, left = divmod(self.policy.get("grad_accum", 1), max(1, micro_batches))
        if left:
            self.refuse(reads[0], f"a step is not a number of runs of {micro_batches} micro-batches")
        if runs > 1:
            self.set("pp_runs", runs, *reads)

    def set_dispatch(self, read: Value) -> None:
        """How tokens reach experts on other ranks, by the name of a library; its buffers are not counted."""
        if self.mesh.get("ep", 1) == 1 or read.word() in ("", "none", "torch", "standard", "false"):
            return
        if read.word() in ("deepep", "hybridep", "true"):
            self.set("expert_dispatch", "once", read)
            self.notes.append(f"{read.key} = {read.value}: its own buffers are not in the estimate of memory")
        else:
            self.notes.append(f"{read.key} = {read.value} is not modelled: NCCL's all-to-all is estimated")

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, each with its own batches."""
        return self.mesh.get("dp_replicate", 1) * self.mesh.get("dp_shard", 1)

    def refuse(self, read: Value, why: str) -> NoReturn:
        """Refuse a setting that cannot be estimated, by its key. Raises ``ModelError``."""
        raise ModelError(f"{read.source}: {read.key} = {read.value!r}: {why}")

    def judge_unmodelled(self) -> None:
        """Refuse keys that change the training, and note those that are left out. Raises ``ModelError``."""
        for key, value in self.values.items():
            found = Value(key, value, self.places[key])
            refusals = _reasons(self.format.refused, key)
            left_out = _reasons(self.format.bounded, key)
            if refusals or left_out:
                self._read.add(key)
            if refusals and is_set(found):
                self.refuse(found, f"{refusals[0]}; --override {key}=none estimates the run without it")
            if left_out and is_set(found):
                self.notes.append(f"{key} = {value} is not modelled: {left_out[0]}")

    def opens_documents(self, read: Value) -> None:
        """Say that sequences are packed, of how many documents is not known."""
        self.ask(
            "documents",
            f"{read.key}: no file says how many documents a packed sequence has. One is estimated, which has "
            "the most attention",
            " varlen:K",
        )

    def unused(self) -> tuple[list[str], list[str]]:
        """Keys that change no estimate, and keys that this reader does not know."""
        left = [key for key in self.values if key not in self._read]
        harmless = [key for key in left if any(fnmatchcase(key, one) for one in self.format.no_effect)]
        return harmless, [key for key in left if key not in set(harmless)]

    def misspelt(self, unknown: Iterable[str]) -> dict[str, str]:
        """Return unknown keys that resemble a key of the same section that is read and not given."""
        absent: dict[str, list[str]] = defaultdict(list)
        for section, _, name in (key.rpartition(".") for key in sorted(self._read - self.values.keys())):
            absent[section].append(name)
        meant = {}
        for key in unknown:
            section, dot, name = key.rpartition(".")
            for close in get_close_matches(name, absent[section], n=1, cutoff=_RESEMBLES):
                meant[key] = f"{section}{dot}{close}"
        return meant

    def _row(self, option: str, value: Any, read: tuple[Value, ...]) -> None:
        for found in read:
            self.rows.append((found, option, _text(value)))


def _reasons(by_pattern: Mapping[str, str], key: str) -> list[str]:
    return [why for pattern, why in by_pattern.items() if fnmatchcase(key, pattern)]


def is_set(found: Value) -> bool:
    """Whether a key has a value that switches something on; an empty section does not."""
    return found.word() not in ("", "false", "no", "none", "null", "0", "0.0", "{}", "[]")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def flattened(values: Any, prefix: str = "") -> dict[str, Any]:
    """A table of tables as dotted keys; lists stay whole, an empty table is itself."""
    if not isinstance(values, Mapping) or not values:
        return {prefix: values} if prefix else {}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flattened(value, f"{prefix}.{name}" if prefix else str(name))
    return found
