"""Accelerators and networks by name or from a file, each figure with its source. No silent default."""

from __future__ import annotations

import difflib
import os
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from fsdp2prof.errors import ModelError, UsageError
from fsdp2prof.estimators.config import shares
from fsdp2prof.estimators.config.documents import packaged, parse_yaml, read_text
from fsdp2prof.estimators.config.nccl_tests import tables_of
from fsdp2prof.units import parse_bytes

_MIB, _GIGA, _TERA = 1 << 20, 10**9, 10**12

_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "tf32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
}

_Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=1e-6, le=1e9)]
"""Of GB/s, TFLOP/s, W or MiB: no part is a million times better or worse than those there are."""
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 56)]
_Nanoseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
_SOME = msgspec.Meta(min_length=1)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    networks: dict[str, Any] = {}
    accelerators: dict[str, Any] = {}


class NetworkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between nodes, by the figures of one NIC."""

    name: str = ""
    gb_per_s: float
    """Line rate of one NIC, one direction."""
    achieved_frac: float
    """Share of it that large collectives reach."""
    source: str = ""

    @property
    def range(self) -> tuple[float, float]:
        """Slowest and fastest that collectives between nodes may be, over the estimate's rate."""
        return shares.NETWORK_LOW, 1 / self.achieved_frac

    @classmethod
    def parse(cls, text: str) -> NetworkSpec:
        """Look up a name. Raises ``ModelError``."""
        return _named(text, known_networks(), "network")


class HardwareSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An accelerator: memory, peak rates and links; ``hardware.yaml`` documents each figure."""

    name: str = ""
    memory_mib: _Rate
    """Memory the driver reports in total, of which the context takes a part."""
    aliases: tuple[str, ...] = ()
    memory_gb_per_s: _Rate | None = None
    achieved_memory_gb_per_s: _Rate | None = None
    link_gb_per_s: _Rate | None = None
    """Bandwidth to peers inside a node, one direction, all links of a device together."""
    bus_gb_per_s: dict[_Count, _Rate] = {}
    direct_gpus: _Count | None = None
    node_gpus: _Count = 8
    """GPUs that one node has, or a rack with a switch for all of it."""
    host_gpus: _Count | None = None
    """GPUs of one host, where a rack has several."""
    nvls_gb_per_s: _Rate | None = None
    nvls_ranks: _Count = 2
    multiprocessors: _Count | None = None
    watts: _Rate | None = None
    """Power limit of the part."""
    achieved_at_watts: _Rate | None = None
    """Power limit at which the achieved rates were measured, if not the same: see :attr:`power_frac`."""
    peak_tflops: dict[str, _Rate] = {}
    achieved_tflops: dict[str, _Rate] = {}
    is_tried: bool = False
    """Whether the estimate is held against published trainings on it, at its power limit."""
    published_median: _Rate | None = None
    """Published over predicted steps of dense models, the median of the sources' medians, where predictions
    are biased."""
    lowest_compute_frac: _Share = 1.0
    """Lowest rate of products that was published, over the achieved ones: other libraries, other shapes."""
    attention_tflops: _Rate | Annotated[dict[str, _Rate], _SOME] | None = None
    """Of flash attention, or by kernel (``flash``, ``cudnn``)."""
    attention_backward_frac: _Share | Annotated[dict[str, _Share], _SOME] = 0.87
    """Backward over forward rate, likewise; as on an H100: FlashAttention-3, figures 5 and 6."""
    host_link_gb_per_s: _Rate = 25.0
    """Pinned copies between host and device: PCIe 4 x16 as measured."""
    host_memory_gb_per_s: _Rate = 61.0
    """A device's share of its host's memory bandwidth, all cores at work: as of a DGX H100, whose 8 devices
    share 16 channels of DDR5-4800 (614 GB/s, 80 % of it in STREAM)."""
    kernel_floor_ns: _Nanoseconds = 2000
    """An empty kernel with its gap to the next one."""
    host_operator_ns: _Nanoseconds | None = None
    """Measured host time to issue an operator in eager mode."""
    overlap_slowdown_frac: Annotated[float, msgspec.Meta(ge=0, le=1e3)] | None = None
    """How much longer a product takes beside a collective, as measured."""
    on_host: bool = False
    """Whether operators run on the host itself and collectives block it: a CPU."""
    collectives: dict[str, dict[_Count, list[tuple[_Bytes, _Nanoseconds]]]] = {}
    """Operation -> ranks of one node -> measured (payload in bytes, nanoseconds), ascending."""
    source: str = ""

    @classmethod
    def parse(cls, text: str) -> HardwareSpec:
        """Look up a name, accept only a memory size such as ``80GiB``, or read a YAML or JSON file.

        ``a100-80gb@300W`` is a part at another power limit than its data sheet's. Outputs of nccl-tests or
        rccl-tests, one file or a folder, give the accelerator they ran on, with its measured collectives.
        Raises ``ModelError``.
        """
        if text.lower().endswith((".txt", ".log", ".out")) or (
            text.lower() not in known_hardware() and os.path.isdir(text)  # noqa: PTH112  (False for no name at all)
        ):
            return _of_nccl_tests(Path(text))
        if text.lower().endswith((".yaml", ".yml", ".json")):
            return _of_file(Path(text))
        if re.match(r"^\s*[0-9.]+\s*[kmgtKMGT]", text):
            try:
                size = parse_bytes(text)
            except UsageError as error:
                raise ModelError(f"hardware: {error}") from None
            return cls(name=text.strip(), memory_mib=size / _MIB, source="given by its memory size")
        if text.lower() == "cpu":
            raise ModelError(
                "hardware 'cpu': no CPU is built in. Measure it: `fsdp2prof bench -o cpu.json -- "
                "torchrun --nproc-per-node N`, then --hardware cpu.json (a memory size alone: 64GiB)"
            )
        name, at, limit = text.partition("@")
        part = _named(name, known_hardware(), "hardware", " (or give a memory size: 80GiB, or a file)")
        return part.limited_to(limit) if at else part

    def limited_to(self, limit: str) -> HardwareSpec:
        """Return it at a power limit such as ``300W``. Raises ``ModelError``."""
        found = re.fullmatch(r"([0-9]+)[wW]", limit.strip())
        if found is None or not int(found[1]):
            raise ModelError(
                f"hardware {self.name}@{limit}: write its power limit in watts, as {self.name}@300W"
            )
        if self.watts is None:
            raise ModelError(f"hardware {self.name}@{limit}: its data sheet's power limit is not known")
        return msgspec.structs.replace(
            self,
            name=f"{self.name}@{found[1]}W",
            watts=float(found[1]),
            achieved_at_watts=self.achieved_at_watts or self.watts,
            is_tried=False,
        )

    @property
    def memory_bytes(self) -> int:
        """Memory in total."""
        return round(self.memory_mib * _MIB)

    @property
    def link_bytes_per_s(self) -> int | None:
        """Peak bandwidth to peers inside a node."""
        return None if self.link_gb_per_s is None else round(self.link_gb_per_s * _GIGA)

    @property
    def memory_bytes_per_s(self) -> int | None:
        """Peak bandwidth of the device's own memory."""
        return None if self.memory_gb_per_s is None else round(self.memory_gb_per_s * _GIGA)

    @property
    def flops(self) -> dict[str, int]:
        """Torch dtype name -> peak operations per second; a dtype without hardware is absent."""
        return {_DTYPES[name]: round(value * _TERA) for name, value in self.peak_tflops.items()}

    @property
    def host_link_bytes_per_s(self) -> float:
        """Pinned copies between host and device."""
        return self.host_link_gb_per_s * _GIGA

    @property
    def achieved_memory_bytes_per_s(self) -> float:
        """Bandwidth that a large copy reaches, read and written bytes counted. Raises ``ModelError``."""
        if self.achieved_memory_gb_per_s is not None:
            return self.achieved_memory_gb_per_s * _GIGA
        return self._stated("memory_gb_per_s", self.memory_gb_per_s) * shares.ACHIEVED_MEMORY * _GIGA

    def achieved_flops(self, dtype: str) -> float:
        """Operations per second of large matrix products of a torch dtype. Raises ``ModelError``."""
        names = [short for short, name in _DTYPES.items() if name == dtype]
        if dtype == "float32" and "tf32" not in names:
            names.append("fp32")
        for name in names:
            if name in self.achieved_tflops:
                return self.achieved_tflops[name] * _TERA * self.power_frac
            if name in self.peak_tflops:
                return self.peak_tflops[name] * shares.ACHIEVED_MATMUL * _TERA
        known = ", ".join(sorted({*self.peak_tflops, *self.achieved_tflops})) or "no type"
        raise ModelError(
            f"hardware {self.name} states no matrix rate for {dtype}, only for {known}: choose another "
            "--param-dtype, or describe the part in a file (--hardware FILE)"
        )

    def with_attention(self, kernel: str) -> HardwareSpec:
        """Return the same part with one kernel's attention rate.

        If that rate is not stated, the first kernel's rate is used and the source says so.
        FlashAttention-3 runs on few parts: without a stated rate, raises ``ModelError``.
        """
        stated = self.attention_tflops if isinstance(self.attention_tflops, dict) else {"flash": None}
        if kernel == "flash3" and kernel not in stated:
            raise ModelError(
                f"hardware {self.name} states no rate of FlashAttention-3: choose another --attention "
                f"({', '.join(stated)}), or describe the part in a file (--hardware FILE)"
            )

        def of(stated: float | dict[str, float]) -> float:
            return stated.get(kernel, next(iter(stated.values()))) if isinstance(stated, dict) else stated

        tflops = None if self.attention_tflops is None else of(self.attention_tflops)
        backward = of(self.attention_backward_frac)
        source = self.source
        if kernel not in stated and kernel != "math":
            source += f"; attention at the rate of {next(iter(stated))}: none is stated for {kernel}"
        return msgspec.structs.replace(
            self, attention_tflops=tflops, attention_backward_frac=backward, source=source
        )

    @property
    def fastest_attention(self) -> str | None:
        """The kernel with the highest rate, where several are stated."""
        stated = self.attention_tflops
        return max(stated, key=stated.__getitem__) if isinstance(stated, dict) else None

    def attention_flops(self, dtype: str, head_dim: int, seq_len: int, *, backward: bool = False) -> float:
        """Operations per second of causal flash attention, forward or backward. Raises ``ModelError``."""
        if isinstance(self.attention_tflops, dict) or isinstance(self.attention_backward_frac, dict):
            return self.with_attention("flash").attention_flops(dtype, head_dim, seq_len, backward=backward)
        plateau = self.attention_tflops
        if plateau is None:
            products = (
                "float16" if "fp16" in self.peak_tflops and "bf16" not in self.peak_tflops else "bfloat16"
            )
            plateau = self.achieved_flops(products) / _TERA / self.power_frac * shares.ATTENTION
        if dtype == "float32":  # no tensor cores for it
            plateau = min(plateau, self.peak_tflops.get("fp32", plateau))
        depth = shares.ATTENTION_DEPTH[min(shares.ATTENTION_DEPTH, key=lambda known: abs(known - head_dim))]
        direction = self.attention_backward_frac if backward else 1.0
        whole = plateau * _TERA * self.power_frac * depth * direction
        return whole * _interpolated(shares.ATTENTION_CURVE, seq_len)

    @property
    def power_frac(self) -> float:
        """Share of the measured matrix and attention rates that a part keeps at a lower power limit.

        Dynamic power grows with frequency times voltage squared. If voltage falls with frequency, a rate
        that is limited by power falls with the cube root of the power above idle; if voltage is at its
        minimum, it falls in proportion. The estimate is between the two: voltage falls half as much as
        frequency.
        """
        return self._power_fracs[1]

    @property
    def _power_fracs(self) -> tuple[float, float, float]:
        if self.watts is None or self.achieved_at_watts is None:
            return 1.0, 1.0, 1.0
        left = max(0.0, self.watts - shares.IDLE_WATTS) / max(1.0, self.achieved_at_watts - shares.IDLE_WATTS)
        low, middle, high = (float(min(1.0, left**exponent)) for exponent in shares.CLOCK_EXPONENTS)
        return low, middle, high

    @property
    def compute_range(self) -> tuple[float, float]:
        """Slowest and fastest that products and attention may be, over the estimate's rates."""
        low, middle, high = self._power_fracs
        ends = (1.0, 1.0)
        if not self.achieved_tflops:
            ends = (
                shares.ACHIEVED_MATMUL_ENDS[0] / shares.ACHIEVED_MATMUL,
                shares.ACHIEVED_MATMUL_ENDS[1] / shares.ACHIEVED_MATMUL,
            )
        slow = shares.PARTS_DIFFER * self.lowest_compute_frac * ends[0] * low / middle
        return slow, shares.BEST_SHAPE * ends[1] * high / middle

    @property
    def memory_range(self) -> tuple[float, float]:
        """Slowest and fastest that kernels may move memory, over the estimate's rate."""
        return shares.KERNELS_OF_COPY

    @property
    def units(self) -> int:
        """Multiprocessors. Raises ``ModelError``."""
        return int(self._stated("multiprocessors", self.multiprocessors))

    def node_bus_bytes_per_s(self, ranks: int, *, direct: bool = False) -> float:
        """Bus bandwidth of a large collective over some ranks of one node.

        ``direct``: its GPUs have no switch between them (:attr:`direct_gpus`).
        """
        if self.link_gb_per_s is None and not self.bus_gb_per_s:
            return shares.ACHIEVED_PCIE * self.host_link_gb_per_s * _GIGA  # one direction, shared by the ring
        whole = (self.link_gb_per_s or 0.0) * shares.ACHIEVED_LINK
        if self.bus_gb_per_s:
            curve = tuple(sorted((count, rate) for count, rate in self.bus_gb_per_s.items()))
            whole = _interpolated(curve, ranks)
        if direct and self.direct_gpus is not None and self.link_gb_per_s is not None:
            used = (ranks - 1) / (self.direct_gpus - 1)
            whole = min(whole, self.link_gb_per_s * shares.ACHIEVED_LINK * used)
        return whole * _GIGA

    @property
    def link_range(self) -> tuple[float, float]:
        """Slowest and fastest that a node's collectives may be, over the estimate's rate."""
        return shares.PCIE_ENDS if self.link_gb_per_s is None else shares.LINK_ENDS

    @property
    def small_link_range(self) -> tuple[float, float]:
        """The same of small collectives."""
        return shares.PCIE_ENDS if self.link_gb_per_s is None else shares.SMALL_LINK_ENDS

    def measured_ns(self, op: str, ranks: int, payload_bytes: int) -> int | None:
        """Measured time of a collective in one node; None if it was not measured.

        Linear between the two nearest sizes; beyond the largest, at the rate of the last two.
        """
        curve = self.collectives.get(op, {}).get(ranks)
        if not curve:
            return None
        for (low, fast), (high, slow) in pairwise(curve):
            if payload_bytes <= high or high == curve[-1][0]:
                part = max(0, payload_bytes - low) / (high - low)
                return max(1, round(fast + (slow - fast) * part))
        return curve[0][1]

    def assumed(self) -> list[str]:
        """Sentences about rates that are a stated share of a peak instead of a published measurement."""
        notes = []
        if not self.achieved_tflops:
            notes.append(
                f"large matrix products reach {shares.ACHIEVED_MATMUL:.0%} of the peak of {self.name}"
            )
        if self.achieved_memory_gb_per_s is None:
            notes.append(
                f"memory traffic reaches {shares.ACHIEVED_MEMORY:.0%} of the bandwidth of {self.name}"
            )
        if self.attention_tflops is None:
            notes.append(
                f"flash attention reaches {shares.ATTENTION:.0%} of the rate of large matrix products"
            )
        return notes

    def _stated(self, name: str, value: float | None) -> float:
        if value is None:
            raise ModelError(
                f"hardware {self.name}: {name} is not stated, and a step's time needs it: name an "
                "accelerator, or state it in a file"
            )
        return value


_Spec = TypeVar("_Spec", NetworkSpec, HardwareSpec)


@lru_cache(maxsize=1)
def _builtin() -> _File:
    return packaged("fsdp2prof.estimators.config", "hardware.yaml", _File)


@lru_cache(maxsize=1)
def known_hardware() -> dict[str, HardwareSpec]:
    """Every accelerator by its name and by its aliases."""
    specs = [_hardware(name, entry, name) for name, entry in _builtin().accelerators.items()]
    return {name: spec for spec in specs for name in (spec.name, *spec.aliases)}


@lru_cache(maxsize=1)
def known_networks() -> dict[str, NetworkSpec]:
    """Every network by its name."""
    return {
        name: msgspec.convert({**entry, "name": name}, NetworkSpec)
        for name, entry in _builtin().networks.items()
    }


def _of_file(path: Path) -> HardwareSpec:
    try:
        text = read_text(path)
    except ValueError as error:
        raise ModelError(f"hardware {path}: {error}") from None
    found = list(_parsed(_described(text), str(path)).accelerators.items())
    if len(found) != 1:
        raise ModelError(
            f"hardware {path}: it describes {len(found)} accelerators under `accelerators`, not one"
        )
    return _hardware(*found[0], str(path))


def _of_nccl_tests(path: Path) -> HardwareSpec:
    """A known accelerator with the collectives of one node that were measured."""
    spec: HardwareSpec | None = None
    measured: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        try:
            tables = list(tables_of(read_text(file), file.name))
        except ValueError as error:
            raise ModelError(f"hardware {file}: {error}") from None
        for table in tables:
            if table.hosts > 1:
                raise ModelError(
                    f"hardware {file}: {table.op} ran over {table.hosts} hosts; give tables of one host, and "
                    "--network for the network between them"
                )
            found = _of_device(table.device, str(file))
            if spec is not None and found.name != spec.name:
                raise ModelError(f"hardware {file}: {found.name}, and {spec.name} in the file before")
            spec = found
            measured.setdefault(table.op, {})[table.ranks] = table.curve
    if spec is None:
        raise ModelError(f"hardware {path}: the folder is empty")
    return msgspec.structs.replace(
        spec, collectives=measured, source=f"{spec.source}; collectives of one node from {path.name}"
    )


def _of_device(device: str, where: str) -> HardwareSpec:
    """The accelerator by its driver's name; the longest name whose parts all occur in it."""
    compact = re.sub(r"[^a-z0-9]", "", device.lower())
    known = known_hardware()
    names = [name for name in known if all(part in compact for part in name.split("-"))]
    if not names:
        raise ModelError(
            f"hardware {where}: {device!r} is not known; describe it in a YAML file, with its `collectives`"
        )
    return known[max(names, key=len)]


def _described(text: str) -> str:
    """Return only the accelerators of a document that ``bench`` wrote; any other document unchanged."""
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    if not isinstance(document, dict) or not str(document.get("schema", "")).startswith("fsdp2prof.bench/"):
        return text
    return msgspec.json.encode({"accelerators": document.get("accelerators")}).decode()


def _parsed(text: str, where: str) -> _File:
    try:
        return msgspec.convert(parse_yaml(text), _File)
    except ValueError as error:
        raise ModelError(f"hardware {where}: {error}") from None


def _hardware(name: str, entry: Any, where: str) -> HardwareSpec:
    if not isinstance(entry, dict):
        raise ModelError(f"hardware {where}: {name} is not a table")
    try:
        spec = msgspec.convert({**entry, "name": name}, HardwareSpec, strict=False)
    except ValueError as error:  # of msgspec's, or of a text that is none
        raise ModelError(f"hardware {where}: {name}: {error}") from None
    for op, of_ranks in spec.collectives.items():
        for ranks, curve in of_ranks.items():
            if any(low >= high for (low, _), (high, _) in pairwise(curve)):
                raise ModelError(f"hardware {where}: {name}: sizes of {op} over {ranks} ranks do not ascend")
    unknown = sorted({*spec.peak_tflops, *spec.achieved_tflops} - set(_DTYPES))
    if unknown:
        raise ModelError(
            f"hardware {where}: {name}: unknown dtype {unknown[0]!r}; known: {', '.join(_DTYPES)}"
        )
    return spec


def _named(text: str, known: dict[str, _Spec], what: str, more: str = "") -> _Spec:
    found = known.get(text.lower())
    if found is not None:
        return found
    close = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(known)}"
    if text.isdigit() and more:
        hint, more = f"did you mean {text}GiB?", ""
    raise ModelError(f"unknown {what} {text!r}: {hint}{more}")


def _interpolated(curve: tuple[tuple[int, float], ...], at: float) -> float:
    """Piecewise linear, flat beyond its ends."""
    if at <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return curve[-1][1]
