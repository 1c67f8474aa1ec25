"""The server: tools that run a verb and give its JSON, resources that say what the JSON means."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeAlias

import click
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from fsdp2prof import __version__
from fsdp2prof.agents.calls import command_line, reduced, run_json, summary_keys
from fsdp2prof.errors import Fsdp2ProfError

Keys: TypeAlias = Annotated[
    list[str] | None,
    Field(
        description="Paths in the document to return in full, such as `trace.by_layer`; default: its summary."
    ),
]
Rows: TypeAlias = Annotated[int, Field(ge=1, le=10_000, description="Maximum rows of each list.")]
Options: TypeAlias = Annotated[
    dict[str, str | int | float | bool | list[str | int | float]] | None,
    Field(
        description="Long options of the command without dashes: {'steps': '3', 'mesh': 'dp_shard=8'}; "
        "resource fsdp2prof://options/VERB lists them."
    ),
]
Limit: TypeAlias = Annotated[float, Field(gt=0, le=3600, description="Time limit of the call in seconds.")]

_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_VERBS = {
    "analyze": ("run", "trace", "memory", "hang", "nccl"),
    "check": ("run", "balance"),
    "compare": (),
    "estimate": ("memory", "comm", "step", "checkpoint", "packing"),
    "inspect": ("mesh", "sharding", "checkpoint", "models", "hardware", "categories"),
    "plan": (),
    "whatif": (),
}
"""Verbs that tools run, and what each looks at."""


def serve(root: click.Group) -> None:
    """Answer on stdin and stdout until stdin ends; ``root`` is the command whose verbs are the tools."""
    make_server(root).run("stdio")


def make_server(root: click.Group) -> MCPServer:
    """Return the server, its tools and resources."""
    server = MCPServer(
        "fsdp2prof",
        version=__version__,
        log_level="ERROR",
        instructions="Profiling, memory and communication of PyTorch FSDP2 (fully_shard) trainings. "
        "Begin with analyze on a run directory; read fsdp2prof://units before quoting a number.",
    )
    _add_tools(server, root)
    _add_resources(server, root)
    return server


def _add_tools(server: MCPServer, root: click.Group) -> None:
    async def call(
        words: tuple[str, ...],
        arguments: tuple[str, ...],
        options: dict[str, Any] | None,
        keys: list[str] | None,
        rows: int,
        limit_s: float,
    ) -> dict[str, Any]:
        try:
            line = command_line(root, words, arguments, options or {})
            document, failed = await run_json(line, limit_s=limit_s)
            answer = reduced(document, summary_keys(document) if keys is None else keys, rows)
        except Fsdp2ProfError as error:
            raise ToolError(str(error)) from error
        return {**answer, "failed": failed} if failed else answer

    @server.tool(annotations=_READS)
    async def analyze(
        path: str,
        what: Literal["run", "trace", "memory", "hang", "nccl"] = "run",
        options: Options = None,
        keys: Keys = None,
        rows: Rows = 20,
        limit_s: Limit = 600,
    ) -> dict[str, Any]:
        """Say where a training step goes, which layer's communication is exposed, and what fills memory.

        path: a run directory of `fsdp2prof record`, Kineto traces, memory snapshots, Flight Recorder dumps
        (hang), logs of NCCL (nccl). Of a run of `fsdp2prof try`, `trial` is what each setting gained.
        """
        return await call(("analyze", what), (path,), options, keys, rows, limit_s)

    @server.tool(annotations=_READS)
    async def check(
        run: str,
        what: Literal["run", "balance"] = "run",
        options: Options = None,
        keys: Keys = None,
        rows: Rows = 20,
        limit_s: Limit = 600,
    ) -> dict[str, Any]:
        """Check a recorded run: is every parameter sharded as its mesh says, is the set-up right (run), and
        do all ranks get the same amount of work (balance)?

        `failed` names the findings that are severe.
        """
        return await call(("check", what), (run,), options, keys, rows, limit_s)

    @server.tool(annotations=_READS)
    async def compare(
        before: str,
        after: str,
        options: Options = None,
        keys: Keys = None,
        rows: Rows = 20,
        limit_s: Limit = 600,
    ) -> dict[str, Any]:
        """Say what changed between two runs, traces, estimates or their saved JSON: time, bytes, memory."""
        return await call(("compare",), (before, after), options, keys, rows, limit_s)

    @server.tool(annotations=_READS)
    async def estimate(
        what: Literal["memory", "comm", "step", "checkpoint", "packing"],
        options: Options = None,
        keys: Keys = None,
        rows: Rows = 20,
        limit_s: Limit = 600,
    ) -> dict[str, Any]:
        """Predict a training that has not run, from model, mesh and policy: memory, bytes, step time.

        options: model ('llama3-8b', a config.json, or package.module:factory, which is imported), mesh
        ('dp_shard=8'), hardware ('h100-sxm'), seq-len, ac, ...
        """
        return await call(("estimate", what), (), options, keys, rows, limit_s)

    @server.tool(annotations=_READS)
    async def inspect(
        what: Literal["mesh", "sharding", "checkpoint", "models", "hardware", "categories"],
        of: str | None = None,
        options: Options = None,
        keys: Keys = None,
        rows: Rows = 20,
        limit_s: Limit = 600,
    ) -> dict[str, Any]:
        """Look up the ranks and groups of a mesh, who holds which rows of a parameter, what a distributed
        checkpoint holds, or which models, accelerators and categories there are.

        of: a mesh ('dp_replicate=2,dp_shard=4'), a run directory (sharding; or options model and mesh), the
        folder of a checkpoint; nothing for models, hardware and categories.
        """
        return await call(("inspect", what), () if of is None else (of,), options, keys, rows, limit_s)

    @server.tool(annotations=_READS)
    async def plan(
        options: Options = None, keys: Keys = None, rows: Rows = 20, limit_s: Limit = 600
    ) -> dict[str, Any]:
        """Find the mesh, micro-batch, checkpointing and resharding that train fastest on a cluster.

        options: model, gpus, hardware, global-batch, seq-len, ...
        """
        return await call(("plan",), (), options, keys, rows, limit_s)

    @server.tool(annotations=_READS)
    async def whatif(
        run: str, options: Options = None, keys: Keys = None, rows: Rows = 20, limit_s: Limit = 600
    ) -> dict[str, Any]:
        """Say what single changes to a recorded run would gain, in time and in memory."""
        return await call(("whatif",), (run,), options, keys, rows, limit_s)


def _add_resources(server: MCPServer, root: click.Group) -> None:
    @server.resource("fsdp2prof://units", mime_type="text/markdown")
    def units() -> str:
        """Units, null, and what exposed, stalled, overlap and wire bytes mean."""
        return _page("units.md")

    @server.resource("fsdp2prof://join-keys", mime_type="text/markdown")
    def join_keys() -> str:
        """Which columns join the tables of a document, and documents with each other."""
        return _page("join-keys.md")

    @server.resource("fsdp2prof://skill", mime_type="text/markdown")
    def skill() -> str:
        """How to find what hurts and what to change, command by command."""
        return _page("SKILL.md")

    for verb, kinds in _VERBS.items():
        for name in [f"{verb} {kind}" for kind in kinds] or [verb]:
            _add_help(server, root, name)


def _add_help(server: MCPServer, root: click.Group, verb: str) -> None:
    @server.resource(
        f"fsdp2prof://options/{verb.replace(' ', '-')}",
        name=f"options of {verb}",
        description=f"Every option of `fsdp2prof {verb}`.",
        mime_type="text/plain",
    )
    def options() -> str:
        context = click.Context(root, info_name="fsdp2prof")
        command: click.Command = root
        for word in verb.split():
            assert isinstance(command, click.Group)
            found = command.get_command(context, word)
            assert found is not None
            command, context = found, click.Context(found, info_name=word, parent=context)
        full: Callable[[click.Context], str] = getattr(command, "get_full_help", command.get_help)
        return full(context)


def _page(name: str) -> str:
    return files("fsdp2prof.agents").joinpath(name).read_text(encoding="utf-8")
