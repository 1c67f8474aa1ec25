"""Options shared by commands: paths and URLs, ranks, steps, shell completion; options without effect are
refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from fsdp2prof.commands.help import CLUSTER, INPUT, MODEL, RUN, Heading, gathered
from fsdp2prof.errors import UsageError
from fsdp2prof.workflows.job.urls import is_url, local_path

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem

    from fsdp2prof.estimators.config.cluster import Cluster
    from fsdp2prof.estimators.config.hardware import HardwareSpec
    from fsdp2prof.estimators.config.measured import Measured, MeasuredRun
    from fsdp2prof.workflows.job.job_files import JobFiles


def complete_model(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete known models; if none has this prefix, complete files (a ``config.json``)."""
    from fsdp2prof.estimators.config.catalog import BUILTIN_MODELS, published_models

    return _names([*BUILTIN_MODELS, *published_models()], begun) or [_files(begun)]


def complete_hardware(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer accelerators."""
    from fsdp2prof.estimators.config.hardware import known_hardware

    return _names(dict.fromkeys(spec.name for spec in known_hardware().values()), begun)


def complete_network(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer networks."""
    from fsdp2prof.estimators.config.hardware import known_networks

    return _names(known_networks(), begun)


def complete_stack(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    """Offer stacks of software."""
    from fsdp2prof.estimators.config.stacks import known_stacks

    return _names(known_stacks(), begun)


def _names(names: Iterable[str], begun: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in names if name.startswith(begun.lower())]


def _files(begun: str) -> CompletionItem:
    from click.shell_completion import CompletionItem

    return CompletionItem(begun, type="file")


MODEL_OPTIONS = (
    MODEL.everyday(
        "--model",
        shell_complete=complete_model,
        help="Built-in name, Hugging Face id, config.json, or package.module:factory.",
    ),
    MODEL("--layers", type=int, help="Number of blocks, instead of the model's own."),
)
"""Options that choose a model, for commands where the model is optional."""


_NETWORK = "Network between the nodes (400gb-ib)."
IN_A_NODE = ("--gpus-per-node", "--network", "--nics-per-node")
"""Options of a place that say nothing without ``--hardware``."""


class Place(NamedTuple):
    """Where a run is, as the options say."""

    hardware: str | None
    gpus_per_node: int | None
    network: str | None
    nics_per_node: int | None

    def cluster(self, hardware: HardwareSpec | None = None, *, copy_engine_gathers: bool = False) -> Cluster:
        """Return the cluster; ``hardware`` if it has already been read. Raises ``ModelError`` for an
        unknown name."""
        from fsdp2prof.estimators.config.cluster import Cluster
        from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec

        found = hardware or HardwareSpec.parse(str(self.hardware))
        return Cluster(
            hardware=found,
            gpus_per_node=self.gpus_per_node or found.node_gpus,
            network=None if self.network is None else NetworkSpec.parse(self.network),
            nics_per_node=self.nics_per_node,
            copy_engine_gathers=copy_engine_gathers,
        )


def place_options(
    hardware: str, *, required: bool = False, network: str = _NETWORK
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options for hardware and network, with the help of two options; the command gets one
    ``place``."""
    options = (
        CLUSTER.everyday("--hardware", required=required, shell_complete=complete_hardware, help=hardware),
        CLUSTER("--gpus-per-node", type=click.IntRange(1), help="[8; 72 in an NVL72 rack]"),
        CLUSTER.everyday("--network", shell_complete=complete_network, help=network),
        CLUSTER("--nics-per-node", type=click.IntRange(1), help="[one a GPU]"),
    )
    return gathered("place", Place, options)


CONFIG_OPTIONS = (
    RUN.everyday(
        "--from-config",
        "trainer_files",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The trainer's own configuration: torchtitan (TOML, or registry.py:NAME), TRL, accelerate, "
        "axolotl, LLaMA-Factory, torchtune, prime-rl, NeMo Automodel, VeOmni; several files of a run.",
    ),
    RUN(
        "--override",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a key of --from-config: training.seq_len=4096.",
    ),
    RUN.everyday(
        "--gpus",
        "--world-size",
        "world_size",
        type=click.IntRange(1),
        help="Number of ranks, for a mesh dimension of -1 or a configuration without a mesh.",
    ),
)
"""The run as a trainer's files describe it."""

MEASURED = RUN(
    "--measured",
    multiple=True,
    metavar="NAME=NUMBER|FILE",
    help="Measurement of this run: tokens_per_s_per_gpu=5600, step_ms=, mfu= or peak_reserved_gib=; or a CSV "
    "or YAML file of other runs, each with its options and one of these. It corrects the prediction.",
)


def measured_of(given: Sequence[str], *, of_memory: bool) -> Measured | list[MeasuredRun] | None:
    """Read ``--measured``: a number of this run, or a file of others; ``None`` if it is not given.

    A number of time says nothing of memory, and one of memory nothing of time. Raises ``UsageError`` and
    ``InputError``.
    """
    from fsdp2prof.estimators.config.measured import Measured, read_measured

    if not given:
        return None
    if len(given) > 1:
        raise UsageError(
            f"--measured is given {len(given)} times: give one number of this run, or a file of several runs"
        )
    text = given[0]
    runs = read_measured(Path(text)) if "=" not in text or Path(text).is_file() else None
    numbers = [Measured.parse(text)] if runs is None else [run.measured for run in runs]
    if any(number.is_memory != of_memory for number in numbers):
        better = "peak_reserved_gib=GIB" if of_memory else "tokens_per_s_per_gpu=N, step_ms=N or mfu=X"
        raise UsageError(f"--measured {text} does not apply to this estimate; give {better}")
    return numbers[0] if runs is None else runs


_MOST_NUMBERS = 1 << 20
"""A million ranks or steps: more than any job has."""

_RANGE = re.compile(r"^(\d+)(?:-(\d+))?$")


def _numbers(_: click.Context, __: click.Parameter, value: str) -> frozenset[int] | None:
    if value == "all":
        return None
    chosen: set[int] = set()
    for item in value.split(","):
        match = _RANGE.match(item.strip())
        if match is None:
            raise click.BadParameter(
                f"{item!r} is not a number or a range; write all, or for example 0,3,8-11"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise click.BadParameter(f"{item!r} ends before it begins")
        if high - low >= _MOST_NUMBERS:
            raise click.BadParameter(f"{item!r} is more than {_MOST_NUMBERS} numbers")
        chosen.update(range(low, high + 1))
    return frozenset(chosen)


def numbers_option(
    flag: str, what: str, *, under: Heading = INPUT, everyday: bool = False, former: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option taking ``all`` (its default) or ``0,3,8-11``; the command gets None or a frozenset."""
    what = f"{what}: all, or for example 0,3,8-11."
    attributes = {"default": "all", "show_default": False, "callback": _numbers, "metavar": "LIST"}
    return under(flag, help=what, everyday=everyday, former=former, **attributes)


class JobChoice(NamedTuple):
    """Which of a job's files a command reads."""

    ranks: frozenset[int] | None
    """None is all."""
    iteration: int | None
    """None is the newest."""

    def open(self, path: Path) -> JobFiles:
        """Find the chosen files at a path; raises ``InputError`` for missing ones."""
        from fsdp2prof.workflows.job.job_files import open_job

        return open_job(path, ranks=self.ranks, iteration=self.iteration)


job_options = gathered(
    "choice",
    JobChoice,
    (
        numbers_option("--ranks", "Ranks to read", everyday=True),
        INPUT(
            "--iteration",
            type=click.IntRange(min=0),
            metavar="N",
            help="Recording to read of a run that has several (recording-000N), or profiling cycle of a "
            "folder (iteration_N); by default the newest.",
        ),
    ),
)
"""Options that choose among the files of a job; the command gets one ``choice``."""


def one_of(chosen: Collection[int] | None, flag: str, what: str) -> int | None:
    """Return the one rank or step that was chosen, None for none; several raise ``UsageError``."""
    if chosen is not None and len(chosen) != 1:
        raise UsageError(f"{flag} looks at one {what}: give --{what}s one number")
    return None if chosen is None else min(chosen)


def refuse_given(*flags: str, because: str) -> None:
    """Refuse options of the running command that have no effect here and yet were given.

    ``flags`` are their long names, of a switch the first; ``because`` says why they have none. Raises
    ``UsageError``.
    """
    context = click.get_current_context()
    given = [
        "/".join(names[-1] for names in (parameter.opts, parameter.secondary_opts) if names)
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        and not set(parameter.opts).isdisjoint(flags)
    ]
    if given:
        raise UsageError(f"{', '.join(given)} would have no effect: {because}")


_SCRATCH = "fsdp2prof.scratch"


class _PathOrUrl(click.Path):
    """A local path as it is; for a URL what :meth:`here` makes of it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a local path. Raises ``InputError`` for a URL that cannot be used."""
        if not isinstance(value, str) or not is_url(value):
            return super().convert(value, param, ctx)
        path = local_path(value)
        return self.here(value) if path is None else path

    def here(self, url: str) -> Path:
        """Return the local path that represents a URL."""
        raise AssertionError(url)


class InputPath(_PathOrUrl):
    """Parameter type of an input path. A URL is copied while the command runs, recordings when needed."""

    def here(self, url: str) -> Path:
        """Copy the contents of the URL."""
        from fsdp2prof.workflows.job.remote import open_url

        return open_url(url, _scratch())


class OutputPath(_PathOrUrl):
    """Parameter type of an output path. A URL stands for a local file, from which the result is uploaded."""

    def here(self, url: str) -> Path:
        """Name a place whose content is sent to the URL."""
        from fsdp2prof.workflows.job.remote import stage

        return stage(url, _scratch())


def _scratch() -> Path:
    """Return the command's folder for copies, which is removed when it ends."""
    from fsdp2prof.workflows.job.remote import scratch_folder

    root = click.get_current_context().find_root()
    if _SCRATCH not in root.meta:
        root.meta[_SCRATCH] = scratch_folder(root.call_on_close)
    return root.meta[_SCRATCH]  # type: ignore[no-any-return]
