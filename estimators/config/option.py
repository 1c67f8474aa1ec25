"""Options of a specification: declared once, read from Python, a file or the command line alike.

An :class:`Option` is the metadata of a dataclass field, with its default, its help and the kind of
value it takes. The specification reads its own values through it; the command line is made from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Protocol

import msgspec

from fsdp2prof.errors import ModelError

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SHORT_DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp64": "float64",
}
_COUNT = re.compile(r"[0-9]{1,6}")
_LONGEST = 4096
"""Most characters of a text; paths are not longer."""
_FACTORY = re.compile(r"[\w.]{1,200}:\w{1,100}")
_KEY = "option"


class Kind(Protocol):
    """The values that an option accepts."""

    @property
    def values(self) -> str:
        """The accepted values, as the user writes them."""

    def read(self, value: Any) -> Any:
        """Return the typed value. Raises ``ValueError`` with the reason if it is invalid."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """How a field is shown to users."""

    default: Any
    kind: Kind
    help: str
    """One sentence, without the default."""
    group: str
    """The heading that the option is listed under, in help and in answers."""
    everyday: bool = False
    """Whether the short help lists it."""
    memory_only: bool = False
    """It changes nothing but memory."""
    planned: bool = False
    """A plan decides it."""

    @property
    def shown_default(self) -> str:
        """The default as the user writes it; empty if there is none."""
        if self.default is None:
            return ""
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return ",".join(self.default) if isinstance(self.default, tuple) else str(self.default)


def option(default: Any, kind: Kind, help: str, *, group: str, **more: bool) -> Any:
    """A dataclass field that is an option."""
    declared = Option(default=default, kind=kind, help=help, group=group, **more)
    return field(default=default, metadata={_KEY: declared})


of_batch = partial(option, group="Batch")
of_sharding = partial(option, group="Sharding")
of_precision = partial(option, group="Precision")
of_checkpointing = partial(option, group="Checkpointing")
of_training = partial(option, group="Training")
of_parallelism = partial(option, group="Parallelism")
of_software = partial(option, group="Software")


def options_of(specification: Any) -> dict[str, Option]:
    """The options of a dataclass or one of its instances, by field, in order."""
    return {item.name: item.metadata[_KEY] for item in fields(specification) if _KEY in item.metadata}


def read_options(specification: Any) -> None:
    """Turn every field's value into a typed one, in place, also in a frozen dataclass.

    Raises ``ModelError`` with one line for the first that is wrong.
    """
    for name, declared in options_of(specification).items():
        try:
            value = declared.kind.read(getattr(specification, name))
        except ValueError as error:
            raise ModelError(f"{name}: {error}") from None
        object.__setattr__(specification, name, value)


def plain(specification: Any) -> dict[str, Any]:
    """The values as a file holds them, which read back as the same."""
    values = {name: getattr(specification, name) for name in options_of(specification)}
    return {
        name: str(value) if isinstance(value, (Counted, ByUnit, Written)) else value
        for name, value in values.items()
    }


class Written(msgspec.Struct, frozen=True):
    """A value written as text in a file."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A word with a count, ``word:K``."""

    word: ClassVar[str]
    count: int

    def __init_subclass__(cls, *, word: str = "") -> None:
        cls.word = word

    def __str__(self) -> str:
        return f"{self.word}:{self.count}"


class ByUnit(msgspec.Struct, frozen=True):
    """A value for all wrapped units and others for some, ``always,norm+output=never``."""

    base: Any
    units: tuple[tuple[str, Any], ...]
    """Unit, named as in ``wrap``, and its value; a later one wins over an earlier."""

    def __str__(self) -> str:
        return ",".join([_written(self.base), *(f"{unit}={_written(value)}" for unit, value in self.units)])


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ">".join(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


class Integer(msgspec.Struct, frozen=True):
    """A whole number within bounds."""

    least: int
    most: int

    @property
    def values(self) -> str:
        """A number."""
        return "N"

    def read(self, value: Any) -> int:
        """Return the number."""
        if not isinstance(value, int) or isinstance(value, bool) or value < self.least:
            raise ValueError(f"{value!r} must be an integer of at least {self.least}")
        if value > self.most:
            raise ValueError(f"{value!r} is more than {self.most}")
        return value


class Number(msgspec.Struct, frozen=True):
    """A number, whole or not."""

    least: float

    @property
    def values(self) -> str:
        """A number."""
        return "X"

    def read(self, value: Any) -> float:
        """Return the number; text may hold it."""
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not self.least <= number < float("inf"):
            raise ValueError(f"{value!r} must be a number of at least {self.least:g}")
        return number


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """Yes or no; with ``unset`` also neither."""

    unset: bool = False
    off: str | None = None
    """The option that switches it off on the command line, instead of ``--no-`` and its name."""

    @property
    def values(self) -> str:
        """Yes or no."""
        return "true|false"

    def read(self, value: Any) -> bool | None:
        """Return the answer."""
        if not isinstance(value, bool) and not (self.unset and value is None):
            raise ValueError(f"{value!r} must be true or false")
        return value


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """One of a few words; if declared so, also an empty value, a word with a count, or a number."""

    words: tuple[str, ...]
    none: bool = False
    counted: type[Counted] | tuple[type[Counted], ...] | None = None
    """Words that take a count."""
    number: str | None = None
    """Meaning of a number from 1 upward."""
    factory: bool = False
    """Whether ``package.module:factory`` is also accepted."""
    refused: tuple[tuple[str, str], ...] = ()
    """Words for techniques that are not modelled, and the replacement to use."""

    @property
    def _counted(self) -> tuple[type[Counted], ...]:
        if self.counted is None:
            return ()
        return self.counted if isinstance(self.counted, tuple) else (self.counted,)

    @property
    def values(self) -> str:
        """The words and the other accepted forms."""
        counted = [f"{kind.word}:K" for kind in self._counted]
        counted += ["PACKAGE:FACTORY"] * self.factory
        return "|".join([*self.words, *["none"] * self.none, *counted, *["K"] * (self.number is not None)])

    def read(self, value: Any) -> Any:
        """Return the word, ``None``, the counted word or the number."""
        if isinstance(value, str) and value in self.words:
            return value
        if self.none and value in (None, "none"):
            return None
        text = str(value)
        if self.number is not None and not isinstance(value, bool) and (number := _count(text)):
            return number
        word, _, count = text.partition(":")
        if instead := dict(self.refused).get(word.lower().replace("_", "-")):
            raise ValueError(f"{word} is not modelled: {instead}")
        for kind in self._counted:
            if word == kind.word and (number := _count(count)):
                return kind(number)
        if self.factory and _FACTORY.fullmatch(text):
            return text
        last = [f"{kind.word}:K with K >= 1" for kind in self._counted]
        last += ["package.module:factory"] * self.factory
        last += [self.number] if self.number is not None else []
        words = [", ".join(self.words)] if self.words else []
        listed = " or ".join([*words, *["none"] * self.none, *last])
        raise ValueError(f"unknown value {value!r}; one of {listed}")


def _count(text: str) -> int | None:
    """A number from 1 on of at most six digits; None for any other text."""
    return int(text) or None if _COUNT.fullmatch(text) else None


class Dtype(msgspec.Struct, frozen=True, kw_only=True):
    """A dtype to train in, by torch's name or a short one; with ``none`` also nothing."""

    none: bool = False

    @property
    def values(self) -> str:
        """Short names."""
        return "bf16|fp16|fp32|fp64" + "|none" * self.none

    def read(self, value: Any) -> str | None:
        """Return torch's name."""
        if self.none and value in (None, "none"):
            return None
        name = str(value).lower().removeprefix("torch.")
        name = _SHORT_DTYPES.get(name, name)
        if name not in _DTYPES:
            raise ValueError(f"unknown dtype {value!r}; one of {', '.join(_DTYPES)}")
        return name


class Names(msgspec.Struct, frozen=True):
    """Several names, at least one; with ``none`` also nothing."""

    example: str
    none: bool = False

    @property
    def values(self) -> str:
        """Names."""
        return "NAME,..."

    def read(self, value: Any) -> tuple[str, ...] | None:
        """Return the names; text holds them with commas between."""
        if self.none and value in (None, "none"):
            return None
        names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{value!r} is not a list of names; for example {self.example}")
        if not names or not all(names):
            raise ValueError(f"empty; write {self.example}")
        return tuple(names)


class Text(msgspec.Struct, frozen=True):
    """Any text, or nothing."""

    values: str

    def read(self, value: Any) -> str | None:
        """Return the text."""
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{value!r} must be text")
        if value is not None and len(value) > _LONGEST:
            raise ValueError(f"longer than {_LONGEST} characters")
        return value


class Regex(Text, frozen=True):
    """A regular expression, or nothing."""

    values: str = "REGEX"

    def read(self, value: Any) -> str | None:
        """Return its text."""
        text = Text.read(self, value)
        try:
            re.compile(text or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
        return text


class Prefetched(msgspec.Struct, frozen=True):
    """How many of the next blocks, or which units in order, are prefetched."""

    most: int

    @property
    def values(self) -> str:
        """A number, or names."""
        return "N|UNIT>UNIT..."

    def read(self, value: Any) -> int | tuple[str, ...]:
        """Return the number or the names; text that is not a number is a single name."""
        if isinstance(value, str) and not value.isdecimal():
            value = tuple(part.strip() for part in value.split(">"))
        if isinstance(value, tuple) and value and all(value):
            return value
        text = str(value)
        if isinstance(value, bool) or not text.isdecimal() or len(text) > 9 or int(text) > self.most:
            raise ValueError(f"{value!r} must be a number of blocks up to {self.most}, or units as a>b")
        return int(text)


class YesNo(msgspec.Struct, frozen=True):
    """Yes or no, in words."""

    @property
    def values(self) -> str:
        """The words."""
        return "yes|no"

    def read(self, value: Any) -> bool:
        """Return the answer."""
        answer = {"yes": True, "true": True, "no": False, "false": False}.get(str(value).lower())
        if answer is None:
            raise ValueError(f"{value!r} must be yes or no")
        return answer


class PerUnit(msgspec.Struct, frozen=True):
    """A value for all wrapped units; after it, or instead of it, ``unit=value`` for some, with commas."""

    kind: Kind
    base: Any
    """The default for units that are not named."""

    @property
    def values(self) -> str:
        """The values of one unit, and how to name units."""
        return f"{self.kind.values}[,UNIT=...]"

    def read(self, value: Any) -> Any:
        """Return the typed value, as a :class:`ByUnit` only where some unit has its own."""
        if isinstance(value, ByUnit):
            return self._made(value.base, value.units)
        if isinstance(value, Mapping):
            units = {str(unit): own for unit, own in value.items()}
            return self._made(units.pop("default", self.base), tuple(units.items()))
        if not isinstance(value, str) or "=" not in value:
            return self.kind.read(value)
        parts = [part.strip() for part in value.split(",")]
        base = self.base if "=" in parts[0] else parts.pop(0)
        pairs = [(unit.strip(), own.strip()) for unit, _, own in (part.partition("=") for part in parts)]
        wrong = next(
            (part for part, (unit, own) in zip(parts, pairs, strict=True) if not unit or not own), None
        )
        if wrong is not None:
            raise ValueError(f"{wrong!r} must be unit=value, as norm+output=VALUE")
        return self._made(base, tuple(pairs))

    def _made(self, base: Any, units: tuple[tuple[str, Any], ...]) -> Any:
        read = tuple((unit, self.kind.read(value)) for unit, value in units)
        return ByUnit(self.kind.read(base), read) if read else self.kind.read(base)
