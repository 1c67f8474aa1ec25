"""``fsdp2prof mcp``: the verbs as tools for agents."""

from __future__ import annotations

from importlib.resources import files

import click

from fsdp2prof.commands.help import Command
from fsdp2prof.commands.output import Output, destination_options, refuse_existing
from fsdp2prof.errors import InputError


@click.command(cls=Command, examples=["fsdp2prof skill -o SKILL.md"])
@destination_options("Write to this file instead of stdout.")
def skill(*, output: Output) -> None:
    """Print SKILL.md: instructions for agents that run commands, to find losses in a training and the
    changes to make."""
    if output.path is not None:
        output.path.parent.mkdir(parents=True, exist_ok=True)
        refuse_existing(output.path, output.force)
    output.write(files("fsdp2prof.agents").joinpath("SKILL.md").read_text(encoding="utf-8"))


@click.command(cls=Command, examples=["fsdp2prof mcp"])
@click.pass_context
def mcp(context: click.Context) -> None:
    """Serve analyze, check, compare, estimate, inspect, plan and whatif to an agent.

    The protocol is the Model Context Protocol, on stdin and stdout.

    Needs the SDK: pip install 'fsdp2prof[mcp]'. Tools only read the given paths and write nothing.
    """
    try:
        from fsdp2prof.agents.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("mcp", "pydantic"):
            raise
        raise InputError(
            "`fsdp2prof mcp` needs the SDK, 2.0 or newer: pip install 'fsdp2prof[mcp]'"
        ) from error
    root = context.find_root().command
    assert isinstance(root, click.Group)
    serve(root)
