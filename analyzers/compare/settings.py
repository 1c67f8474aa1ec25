"""Differences in the setup of two runs: command, libraries, environment, devices, sharding, optimizers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdp2prof.analyzers.layers import FOLD_FROM, families, family_name
from fsdp2prof.results.comparison import SettingChange
from fsdp2prof.results.run import RunSummary, ShardGroup
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.vocabulary import dtype_label

_NAMED = re.compile(r"-*(?P<name>[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)
_OF_ONE_RUN = re.compile(r"(?i)port$|rdzv[-_](id|endpoint)$|run[-_]?id$")
"""Arguments that differ from run to run and change nothing."""
_PORT = re.compile(r"(?<=[\w.\]]):\d{1,5}(?=/|$)")


def setting_changes(before: RunSummary | None, after: RunSummary | None) -> list[SettingChange]:
    """Return the differences in setup; none unless both sides are runs."""
    if before is None or after is None:
        return []
    return changed(_setup(before), _setup(after))


def device_changes(before: TraceAnalysis | None, after: TraceAnalysis | None) -> list[SettingChange]:
    """Return the change of device between two traces that name theirs."""
    names = [_device_names(side) for side in (before, after)]
    return changed({"device": names[0]}, {"device": names[1]}) if all(names) else []


def _device_names(trace: TraceAnalysis | None) -> str:
    ranks = [] if trace is None else trace.ranks
    return ", ".join(sorted({rank.device_name for rank in ranks if rank.device_name is not None}))


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[SettingChange]:
    """Return the settings that are not the same on both sides; of two commands the arguments that differ."""
    changes = []
    for name in {**before, **after}:
        pair = before.get(name), after.get(name)
        if name == "command" and None not in pair:
            changes += _arguments_changed(*(one or "" for one in pair))
        elif not _alike(*pair):
            changes.append(SettingChange(name=name, before=pair[0], after=pair[1]))
    return changes


def _arguments_changed(before: str, after: str) -> list[SettingChange]:
    """Return the named arguments that differ; the whole commands where their other words differ."""
    (words, named), (other_words, other_named) = _arguments(before), _arguments(after)
    if words != other_words:
        return [SettingChange(name="command", before=before, after=after)]
    return [
        SettingChange(name=f"argument {name}", before=named.get(name), after=other_named.get(name))
        for name in {**named, **other_named}
        if not _OF_ONE_RUN.search(name) and not _alike(named.get(name), other_named.get(name))
    ]


def _arguments(command: str) -> tuple[list[str], dict[str, str]]:
    """Split ``torchrun --nproc 2 train.py sync=last`` into its plain words and named arguments."""
    words: list[str] = []
    named: dict[str, str] = {}
    tokens = iter([*command.split(" "), "-"])
    token = next(tokens)
    for following in tokens:
        if match := _NAMED.fullmatch(token):
            named[match["name"]] = match["value"]
        elif not token.startswith("-"):
            words.append(token)
        elif following.startswith("-") or "=" in following:
            named[token.lstrip("-")] = ""
        else:
            named[token.lstrip("-")] = following
            following = next(tokens)
        token = following
    return words, named


def _alike(before: str | None, after: str | None) -> bool:
    """Whether two values are equal but for the port of an address."""
    if before is None or after is None:
        return before == after
    return _PORT.sub("", before) == _PORT.sub("", after)


def main_settings(run: RunSummary | None) -> dict[str, str]:
    """Return command, world size, device, optimizer and versions; nothing without a run."""
    setup = {} if run is None else _setup(run)
    return {k: v for k, v in setup.items() if not k.startswith(("environment.", "sharding of "))}


def fold_settings(changes: Sequence[SettingChange]) -> list[SettingChange]:
    """Fold settings whose names differ in one number and that changed alike, in order of appearance."""
    folded: list[tuple[int, SettingChange]] = []
    for alike in families([(change.name, (change.before, change.after)) for change in changes]):
        if len(alike) < FOLD_FROM:
            folded += [(i, changes[i]) for i in alike]
        else:
            name = family_name([changes[i].name for i in alike])
            folded.append((alike[0], replace(changes[alike[0]], name=name, settings=len(alike))))
    return [change for _, change in sorted(folded, key=lambda entry: entry[0])]


def _setup(run: RunSummary) -> dict[str, str]:
    known = {
        "command": " ".join(run.command),
        "world_size": "" if run.world_size is None else str(run.world_size),
        "device": ", ".join(sorted({rank.device for rank in run.ranks if rank.device})),
        "optimizer": ", ".join(run.optimizers),
        **run.training,
        **{f"versions.{name}": value for name, value in run.versions.items()},
        **{f"environment.{name}": value for name, value in run.environment.items()},
    }
    several = len({group.root for group in run.shard_groups}) > 1
    for group in run.shard_groups:
        name = f"root{group.root}:{group.fqn or '(root)'}" if several else group.fqn or "(root)"
        known[f"sharding of {name}"] = _sharding(group)
    return {name: value for name, value in known.items() if value}


def _sharding(group: ShardGroup) -> str:
    """Describe a group's sharding: mesh first, resharding last, because narrow terminals cut the middle."""
    gathered = group.param_dtype or group.dtype
    dtypes = [dtype_label(one) for one in (group.dtype, gathered, group.reduce_dtype or gathered)]
    again = group.reshard_after_forward
    resharded = (
        "not resharded" if again is False else "resharded" if again is True else f"resharded to {again}"
    )
    return (
        f"{group.mesh}; {dtypes[0]}, gathered {dtypes[1]}, reduced {dtypes[2]}; "
        f"{'offloaded; ' if group.offload else ''}{resharded}"
    )
