"""The options that describe a run, for every command that predicts one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from fsdp2prof.commands.help import RUN, SOFTWARE, Heading, with_options
from fsdp2prof.commands.options import (
    CONFIG_OPTIONS,
    MODEL_OPTIONS,
    Place,
    complete_model,
    complete_stack,
    place_options,
)
from fsdp2prof.estimators.config.option import Flag, Integer, Option, options_of
from fsdp2prof.estimators.config.policy import PolicySpec

_POLICY = "policy_"
"""Prefix of a policy's options among a command's arguments."""
PLACE_NAMES = frozenset(("hardware", "gpus_per_node", "network", "nics_per_node"))
_LONGEST_VALUES = 60
"""Characters of the values that stand behind an option; more are in its description."""
_MODEL = "MODEL"
"""Placeholder of options that take a model."""


def _policy_option(name: str, declared: Option) -> Callable[[Any], Any]:
    """The command-line option of one field of ``PolicySpec``."""
    kind, default = declared.kind, declared.shown_default
    flag = f"--{name.replace('_', '-')}"
    attributes: dict[str, Any] = {"help": f"{declared.help} [{default}]" if default else declared.help}
    if isinstance(kind, Flag):
        flag = f"{flag}/{kind.off or flag.replace('--', '--no-', 1)}"
        attributes["is_flag"] = True
    elif isinstance(kind, Integer):
        attributes["type"] = int
    else:
        attributes["metavar"] = kind.values
        if len(kind.values) > _LONGEST_VALUES:
            attributes["metavar"] = "KIND"
            attributes["help"] += f" One of {kind.values.replace('|', ', ')}."
        if kind.values == _MODEL:
            attributes["shell_complete"] = complete_model
    return Heading(declared.group)(
        flag, f"{_POLICY}{name}", everyday=declared.everyday, default=None, **attributes
    )


_OPTIONS = (
    *MODEL_OPTIONS,
    RUN.everyday(
        "--mesh",
        help="For example dp_replicate=4,dp_shard=8; also tp, cp, pp, ep. -1 is computed from --world-size.",
    ),
    *CONFIG_OPTIONS,
    RUN(
        "--config",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="The same options as a YAML or TOML file; command-line options take precedence.",
    ),
    RUN(
        "--from-run",
        type=click.Path(path_type=Path),
        help="Read mesh, policy and software from a recorded run.",
    ),
    SOFTWARE(
        "--stack",
        shell_complete=complete_stack,
        help="The software of a known training program (torchtitan-2024-12): wrapping, precision, torch, "
        "kernels, allocator; other options win.",
    ),
    *(_policy_option(name, declared) for name, declared in options_of(PolicySpec).items()),
)
_ANYWHERE = place_options(
    "Accelerator (h100-sxm), a memory size (80GiB), a YAML or JSON file that describes one, or the "
    "output of nccl-tests (a file or a folder)."
)


def described_options(
    *,
    unlisted: Collection[str] = (),
    seldom: Collection[str] = (),
    place: Callable[[Any], Any] = _ANYWHERE,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options that describe a run; the command gets one ``described``, and ``place``.

    All estimates share one description; the help of a command omits ``unlisted`` options, and its short
    help also ``seldom`` ones.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def with_description(
            *,
            config: Path | None,
            from_run: Path | None,
            trainer_files: tuple[Path, ...],
            overrides: tuple[str, ...],
            place: Place,
            training: tuple[str, ...] = (),
            **options: Any,
        ) -> None:
            from fsdp2prof.workflows.description import describe

            given = {name: options.pop(name) for name in ("model", "layers", "mesh", "stack", "world_size")}
            names = [name for name in options if name.startswith(_POLICY)]
            policy = {name.removeprefix(_POLICY): options.pop(name) for name in names}
            described = describe(
                config=config,
                from_run=from_run,
                trainer_files=trainer_files,
                overrides=overrides,
                command=training,
                given=_not_none({**given, "hardware": place.hardware}),
                policy=_not_none(policy),
            )
            typed = click.get_current_context().get_parameter_source
            placed = {name for name in PLACE_NAMES if typed(name) is ParameterSource.COMMANDLINE}
            described = replace(described, given=described.given | placed)
            command(described=described, place=place, **options)

        decorated: Any = place(with_description)
        decorated.__click_params__ += map(copy, _parameters())
        for one in decorated.__click_params__:
            name = one.name.removeprefix(_POLICY)
            one.hidden = name in unlisted
            if name in seldom:
                one.everyday = False
        return cast("Callable[..., None]", decorated)

    return decorate


@cache
def _parameters() -> list[click.Option]:
    """The options of every description; constructing them takes longer than copying."""

    def described() -> None: ...

    parameters: list[click.Option] = cast("Any", with_options(_OPTIONS, described)).__click_params__
    return parameters


def _not_none(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
