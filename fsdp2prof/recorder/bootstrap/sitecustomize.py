"""Loaded by the interpreter of every Python process under ``fsdp2prof record``.

Imports almost nothing: it removes itself from ``sys.path``, runs the ``sitecustomize`` that it shadows,
reports that the process started, and waits for FSDP2 to be imported. In a process that never imports it,
nothing else happens.
"""

import os
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


class _AfterImport(MetaPathFinder):
    """Hands modules over as soon as they have been executed: ``fully_shard`` to the recorder above all."""

    def __init__(self) -> None:
        self._receivers = {
            "torch.distributed.fsdp._fully_shard._fully_shard": _attach,
            "torch.distributed._composable.replicate_with_fsdp": _attach,
            "torch.distributed.distributed_c10d": _rehearse,
            "torch.distributed.device_mesh": _rehearse,
            "torch.nn.parallel.distributed": _note_ddp,
            "torch.distributed.fsdp.fully_sharded_data_parallel": _note_fsdp1,
        }

    def find_spec(self, fullname, path, target=None):  # type: ignore[no-untyped-def]
        receive = self._receivers.pop(fullname, None)
        if receive is None:
            return None
        from importlib.util import find_spec

        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            try:
                receive(module)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                _leave_sign_of_life(f"!{sys.executable} cannot load the recorder ({reason})\n")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _attach(module: object) -> None:
    from fsdp2prof.recorder.attach import install

    install(module)  # type: ignore[arg-type]


def _rehearse(module: object) -> None:
    if '"rehearsal":{' in os.environ.get("FSDP2PROF_RECORD", ""):
        from fsdp2prof.recorder.rehearsal import install

        install(module)  # type: ignore[arg-type]


def _note_ddp(module: object) -> None:
    _note_use(module, "DistributedDataParallel", "DistributedDataParallel")


def _note_fsdp1(module: object) -> None:
    _note_use(module, "FullyShardedDataParallel", "FullyShardedDataParallel (FSDP1)")


def _note_use(module: object, kind: str, name: str) -> None:
    """Let the first model that is wrapped by a class note its name in the sign of life."""
    from functools import wraps

    owner = getattr(module, kind)
    initialize = owner.__init__

    @wraps(initialize)
    def noting(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        owner.__init__ = initialize
        _leave_sign_of_life(name + "\n")
        return initialize(self, *args, **kwargs)

    owner.__init__ = noting


def _run_hidden_sitecustomize() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]  # noqa: PTH100
    ours = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = ours


def _leave_sign_of_life(note: str = "") -> None:
    """Report to the launcher that this process started; a note names a wrapper, or after ``!`` a failure."""
    # The launcher may have ended, this host not share its disk, or the variable not have been handed on.
    with suppress(Exception):
        path = os.path.join(os.environ["FSDP2PROF_ALIVE"], str(os.getpid()))  # noqa: PTH118
        with open(path, "a", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            file.write(note)


if "FSDP2PROF_RECORD" in os.environ:
    _leave_sign_of_life()
    sys.meta_path.insert(0, _AfterImport())
_run_hidden_sitecustomize()
