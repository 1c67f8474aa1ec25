"""A rehearsal: this process plays one rank of a world that does not exist.

``init_process_group`` and ``new_group`` make groups of torch's ``fake`` backend, whatever backend the script
asks for: their collectives return at once, and what they return is this rank's own part, repeated or cut out.
So shapes, memory and the order of commands are those of the rank, and no number that it computes means
anything. With ``meta`` every tensor made after ``init_process_group`` is a fake one, without data.

A training command as one process: what a rehearsal starts instead of a launcher and its ranks.
"""

from __future__ import annotations

import atexit
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.manifest import Rehearsal
from fsdp2prof.recorder.settings import Settings

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

_FROM_OTHERS = {"broadcast_object_list": 1, "scatter_object_list": 2, "recv_object_list": 1}
"""What another rank would send is not to be had, nor how large it is; with the position of ``src``."""

_NAMELESS = {"all_reduce": ("tensor",), "broadcast": ("tensor",), "all_gather": ("tensor_list", "tensor")}
"""Collectives that a trace shows with lists of tensors, without their type: what they are given first."""
_OF_A_MESH = (
    "__init__",
    "__getitem__",
    "_concatenate",
    "_flatten",
    "_get_all_submeshes",
    "_unflatten",
    "from_group",
    "get_all_groups",
    "get_coordinate",
    "get_group",
    "get_local_rank",
    "mesh",
    "size",
)

_mode: FakeTensorMode | None = None


def install(module: ModuleType) -> None:
    """Prepare a module of ``torch.distributed``, before the training can bind what it defines.

    In ``distributed_c10d`` what makes process groups is replaced. ``device_mesh`` stays as it is, except that
    a mesh computes on real tensors where all others have no data.
    """
    settings = Settings.from_environment()
    rehearsal = None if settings is None else settings.rehearsal
    if rehearsal is None:
        return
    if module.__name__.endswith("device_mesh"):
        if rehearsal.meta:
            _keep_meshes_real(module)
        return
    _replace(module, "init_process_group", lambda original: _initializes(original, rehearsal))
    _replace(module, "new_group", _makes_fake)
    for name, given in _NAMELESS.items():
        _replace(module, name, partial(_named_in_the_trace, given))
    _replace(module, "monitored_barrier", lambda _: lambda *_, **__: None)
    for name, position in _FROM_OTHERS.items():
        _replace(module, name, partial(_refuses_others, module, rehearsal, position))


def _replace(module: ModuleType, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(module, name, None)
    if original is not None:
        setattr(module, name, wraps(original)(make(original)))


def _initializes(original: Callable[..., None], rehearsal: Rehearsal) -> Callable[..., None]:
    def init_process_group(*_: Any, **__: Any) -> None:
        from torch.distributed import HashStore

        import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
        original("fake", store=HashStore(), rank=rehearsal.rank, world_size=rehearsal.world_size)
        if rehearsal.meta:
            _leave_no_data()
            _count_from_now()

    return init_process_group


def _makes_fake(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, *_: Any, **named: Any) -> Any:
        kept = {name: named[name] for name in ("group_desc", "sort_ranks") if name in named}
        return original(ranks, backend="fake", **kept)

    return new_group


def _named_in_the_trace(given: Sequence[str], original: Callable[..., Any]) -> Callable[..., Any]:
    """Put a range around a collective that has its tensors as arguments, as a backend of its own would."""

    def collective(*args: Any, **named: Any) -> Any:
        import torch

        tensors = [args[i] if i < len(args) else named.get(name) for i, name in enumerate(given)]
        if not isinstance(tensors[-1], torch.Tensor):
            return original(*args, **named)
        enter: Any = torch.autograd._record_function_with_args_enter
        handle = enter(f"fake:{original.__name__}", *tensors)
        try:
            return original(*args, **named)
        finally:
            torch.autograd._record_function_with_args_exit(handle)

    return collective


def _refuses_others(
    module: Any, rehearsal: Rehearsal, position: int, original: Callable[..., Any]
) -> Callable[..., Any]:
    def exchange(*args: Any, **named: Any) -> Any:
        source = named.get("src", args[position] if len(args) > position else None)
        if named.get("group_src") is not None:
            source = module.get_global_rank(named.get("group") or module.group.WORLD, named["group_src"])
        if (source or 0) != rehearsal.rank:
            print(  # noqa: T201
                f"fsdp2prof: {original.__name__}: rank {rehearsal.rank} waits for objects of rank "
                f"{source or 0}, which a rehearsal does not run; rehearse --rank {source or 0}",
                file=sys.stderr,
            )
            raise SystemExit(1)
        return original(*args, **named)

    return exchange


def _leave_no_data() -> None:
    """Make every tensor a fake one from now on, until the process ends."""
    global _mode
    import torch

    from fsdp2prof.fake_tensors import fake_tensors

    if _mode is None:
        torch.utils.swap_tensors = _forgetting_first(torch.utils.swap_tensors)
        stack = ExitStack()
        _mode = stack.enter_context(fake_tensors(allow_real=True))
        atexit.register(stack.close)


def _count_from_now() -> None:
    """Count storages from here on where memory is recorded from the first step."""
    from fsdp2prof.recorder.guard import guard
    from fsdp2prof.recorder.memory.history import count_from_now
    from fsdp2prof.recorder.rank.captures import Schedule

    settings = Settings.from_environment()
    if settings is not None and Schedule(settings.options).kind(0) == "memory":
        guard.run("memory", count_from_now, stacks=settings.options.stacks)


def _forgetting_first(swap: Callable[..., None]) -> Callable[..., None]:
    """Let ``module.to()`` swap fake parameters: torch refuses those that the mode's own memory refers to."""

    @wraps(swap)
    def swap_tensors(first: Any, second: Any) -> None:
        converter: Any = None if _mode is None else _mode.fake_tensor_converter
        if converter is not None:
            converter.meta_converter.tensor_memo.clear()
        swap(first, second)

    return swap_tensors


def _keep_meshes_real(module: ModuleType) -> None:
    """Let a device mesh, of ``torch.distributed.device_mesh``, compute with its ranks, which are data."""
    module.init_device_mesh = _on_real_tensors(module.init_device_mesh)  # type: ignore[attr-defined]
    mesh: Any = module.DeviceMesh
    for name in _OF_A_MESH:
        member = mesh.__dict__.get(name)
        if isinstance(member, property):
            assert member.fget is not None
            setattr(mesh, name, property(_on_real_tensors(member.fget)))
        elif isinstance(member, staticmethod):
            setattr(mesh, name, staticmethod(_on_real_tensors(member.__func__)))
        elif member is not None:
            setattr(mesh, name, _on_real_tensors(member))


def _on_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily  # torch may still be importing

        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside


def fake_mode() -> FakeTensorMode | None:
    """Return the mode of this process's tensors; None where they have data."""
    return _mode


_STARTS_SEVERAL = (
    "accelerate",
    "srun",
    "mpirun",
    "mpiexec",
    "deepspeed",
    "horovodrun",
    "lightning",
    "fabric",
)
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def as_one_process(command: Sequence[str]) -> tuple[list[str], int | None]:
    """Return the command without torchrun around it, and the ranks per node that torchrun was told.

    Raises ``UsageError`` for a launcher whose processes cannot be read from its command line, ``InputError``
    for a torchrun that is not there.
    """
    name = Path(command[0]).name
    if name == "torchrun":
        return _of_torchrun(_python_beside(command[0]), command[1:])
    module = _module_of_python(command)
    if module in _TORCHRUN_MODULES:
        at = command.index("-m")
        return _of_torchrun(command[:at], command[at + 2 :])
    if name in _STARTS_SEVERAL or module in ("accelerate.commands.launch", "deepspeed.launcher.runner"):
        raise UsageError(
            f"{name} starts processes itself, but a rehearsal runs one: give the command that it starts, "
            "-- python train.py"
        )
    return list(command), None


def _module_of_python(command: Sequence[str]) -> str | None:
    if not Path(command[0]).name.startswith("python") or "-m" not in command[:-1]:
        return None
    at = command.index("-m")
    before = command[1:at]
    return command[at + 1] if all(argument.startswith("-") for argument in before) else None


def _python_beside(torchrun: str) -> list[str]:
    """The interpreter of the environment that torchrun belongs to."""
    found = shutil.which(torchrun)
    if found is None:
        raise InputError(f"{torchrun}: command not found")
    python = Path(found).parent / "python"
    return [str(python) if python.exists() else "python"]


def _of_torchrun(python: Sequence[str], arguments: Sequence[str]) -> tuple[list[str], int | None]:
    from torch.distributed.run import get_args_parser

    try:
        given = get_args_parser().parse_args(list(arguments))
    except SystemExit as error:
        raise UsageError("torchrun refuses these options (above): correct them") from error
    per_node = str(given.nproc_per_node)
    start = [] if given.no_python else [*python, "-m"] if given.module else list(python)
    script = [given.training_script, *given.training_script_args]
    return [*start, *script], int(per_node) if per_node.isdigit() else None
