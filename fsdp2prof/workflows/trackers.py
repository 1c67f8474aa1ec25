"""Numbers of a run to an experiment tracker: each by its own client, told where to by its own environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from fsdp2prof.errors import InputError

__all__ = ["Tracker", "log_scalars"]

Tracker: TypeAlias = Literal["wandb", "mlflow", "tensorboard"]

_PACKAGES: dict[Tracker, str] = {"wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard"}
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. /]")
_LONGEST_IN_MLFLOW = 250


def log_scalars(tracker: Tracker, scalars: Mapping[str, float], *, name: str, folder: Path | None) -> str:
    """Log numbers as those of one run called ``name``; returns where they went.

    ``folder`` is where TensorBoard's event file goes. Raises ``InputError`` if the tracker's package is not
    installed, or the tracker refuses.
    """
    try:
        return _LOGGERS[tracker](scalars, name, folder)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != _PACKAGES[tracker]:
            raise
        raise InputError(f"--log {tracker} needs its package: pip install 'fsdp2prof[{tracker}]'") from error
    except InputError:
        raise
    except Exception as error:  # of as many kinds as trackers have: no server, no login, a full disk
        raise InputError(f"{tracker} did not take the numbers: {error}") from error


def _wandb(scalars: Mapping[str, float], name: str, _: Path | None) -> str:
    import wandb

    with wandb.init(name=name, job_type="fsdp2prof", settings=wandb.Settings(silent=True)) as run:
        run.log(dict(scalars))
        return str(run.url or run.dir)


def _mlflow(scalars: Mapping[str, float], name: str, _: Path | None) -> str:
    import mlflow

    with mlflow.start_run(run_name=name) as run:
        mlflow.log_metrics({_mlflow_name(key): value for key, value in scalars.items()})
        return f"{mlflow.get_tracking_uri()}, run {run.info.run_id}"


def _mlflow_name(name: str) -> str:
    return _NOT_IN_MLFLOW.sub("_", name)[:_LONGEST_IN_MLFLOW]


def _tensorboard(scalars: Mapping[str, float], name: str, folder: Path | None) -> str:
    from tensorboard.summary import Writer

    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    writer = Writer(str(folder / name))
    for key, value in scalars.items():
        writer.add_scalar(key, value, step=0)
    writer.close()
    return str(folder / name)


_LOGGERS = {"wandb": _wandb, "mlflow": _mlflow, "tensorboard": _tensorboard}
