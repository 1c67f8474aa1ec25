"""Merge the files of a run's launchers.

Node 0 writes ``run.json``, every further one ``run-node-0000N.json``: each describes its own part of the
run.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from fsdp2prof.manifest import RUN_SCHEMA, RunInfo, State
from fsdp2prof.readers.run.documents import read_document
from fsdp2prof.run_directory import NODE_FILES, RUN_FILE

_NODE_FILE = re.compile(r"run-node-([0-9]{5,6})\.json")
_BEST_TO_WORST: tuple[State, ...] = ("complete", "other", "partial", "running", "crashed")


def node_ranks(root: Path) -> dict[int, Path]:
    """Return the file of every node that recorded into a run directory, in order of the nodes."""
    files = {
        int(match[1]): file for file in root.glob(NODE_FILES) if (match := _NODE_FILE.fullmatch(file.name))
    }
    if (root / RUN_FILE).is_file():
        files[0] = root / RUN_FILE
    return dict(sorted(files.items()))


def read_run_info(root: Path) -> tuple[RunInfo, list[str]]:
    """Read the description of the run as a whole, and its messages.

    Raises ``RunDirectoryError`` for a file that cannot be read or was written by a newer fsdp2prof.
    """
    nodes = {rank: read_document(file, RunInfo, RUN_SCHEMA)[0] for rank, file in node_ranks(root).items()}
    messages = []
    if 0 not in nodes:
        of = " of node 0" if nodes else ""
        messages.append(f"{RUN_FILE} is missing: the command and the outcome of the run are unknown{of}")
    info = merge_nodes(nodes)
    if info.state == "running" and nodes:
        running = [_name(rank, node) for rank, node in nodes.items() if node.state == "running"]
        of = f" of {', '.join(running)}" if len(nodes) > 1 else ""
        messages.append(f"the run{of} has not ended, or was killed before it wrote its outcome")
    return info, [*info.messages, *messages]


def merge_nodes(nodes: dict[int, RunInfo]) -> RunInfo:
    """Merge the nodes of one run.

    The state is the worst of theirs, the exit code the first that is not 0; command, options and
    environment are those of the lowest node; a message that does not name its rank gets the name of its
    node.
    """
    if len(nodes) <= 1:
        return next(iter(nodes.values()), RunInfo())
    infos = list(nodes.values())
    codes = [info.exit_code for info in infos]
    ended = [info.finished_at for info in infos if info.finished_at is not None]
    worlds = [info.world_size for info in infos if info.world_size is not None]
    first = infos[0]
    return RunInfo(
        schema=first.schema,
        command=first.command,
        state=max((info.state for info in infos), key=_BEST_TO_WORST.index),
        exit_code=next((code for code in codes if code), None if None in codes else 0),
        started_at=min((info.started_at for info in infos if info.started_at), key=_time, default=""),
        finished_at=max(ended, key=_time) if len(ended) == len(infos) else None,
        hosts=list(dict.fromkeys(host for info in infos for host in info.hosts)),
        world_size=max(worlds, default=None),
        versions=first.versions,
        environment=first.environment,
        options=first.options,
        wrappers=sorted({name for info in infos for name in info.wrappers}),
        messages=_messages(nodes),
    )


def _messages(nodes: dict[int, RunInfo]) -> list[str]:
    first = next(iter(nodes.values()))
    latest_start = max((_time(info.started_at) for info in nodes.values() if info.started_at), default=None)
    messages = []
    for rank, info in nodes.items():
        name = _name(rank, info)
        messages += [text if text.startswith("rank") else f"{name}: {text}" for text in info.messages]
        if info.options != first.options:
            messages.append(f"{name}: recorded with different options from {_name(min(nodes), first)}")
        if latest_start is not None and info.finished_at and _time(info.finished_at) < latest_start:
            messages.append(
                f"{name}: ended before another node started, so it is from an older run; record again with -f"
            )
    return messages


def _name(rank: int, info: RunInfo) -> str:
    return f"node {rank} ({', '.join(info.hosts)})" if info.hosts else f"node {rank}"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
