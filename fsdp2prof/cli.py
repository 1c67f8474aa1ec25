"""The ``fsdp2prof`` command: a registry of verbs, each imported only when it is called."""

from __future__ import annotations

import gc
import io
import sys
from importlib import import_module

import click

from fsdp2prof import __version__
from fsdp2prof.commands.help import Group
from fsdp2prof.commands.messages import open_streams, say
from fsdp2prof.errors import Fsdp2ProfError

_VERBS = {
    "record": ("fsdp2prof.commands.record:record", "Record a training command."),
    "rehearse": (
        "fsdp2prof.commands.rehearse:rehearse",
        "Run a training command as one rank of a large world, alone, and record it.",
    ),
    "watch": ("fsdp2prof.commands.watch:watch", "Follow a running job step by step."),
    "trigger": ("fsdp2prof.commands.watch:trigger", "Ask a running job for a recording."),
    "analyze": (
        "fsdp2prof.commands.analyze:analyze",
        "Analyse a run directory, traces, snapshots or a hang.",
    ),
    "estimate": (
        "fsdp2prof.commands.estimate:estimate",
        "Estimate a run in advance: memory, communication, step time, checkpoints.",
    ),
    "plan": (
        "fsdp2prof.commands.plan:plan",
        "Plan a training: the best mesh, batch and policy on a cluster.",
    ),
    "check": (
        "fsdp2prof.commands.check:check",
        "Check that a run is sharded as its mesh defines, and for known mistakes.",
    ),
    "inspect": (
        "fsdp2prof.commands.inspect:inspect",
        "Look up meshes, shardings, checkpoints, models, hardware, categories.",
    ),
    "bench": ("fsdp2prof.commands.bench:bench", "Measure links, devices and hosts of a cluster."),
    "compare": (
        "fsdp2prof.commands.compare:compare",
        "Compare two runs, traces or estimates.",
    ),
    "whatif": ("fsdp2prof.commands.whatif:whatif", "Predict the gain of a change to a recorded run."),
    "try": (
        "fsdp2prof.commands.record:try_",
        "Measure other FSDP2 settings in a running training.",
    ),
    "export": (
        "fsdp2prof.commands.export:export",
        "Export a run: Perfetto, Parquet, CSV, OpenMetrics, Chakra.",
    ),
    "mcp": ("fsdp2prof.commands.mcp:mcp", "Serve the commands to agents through the Model Context Protocol."),
    "skill": ("fsdp2prof.commands.mcp:skill", "Print instructions for agents that use these commands."),
    "report": ("fsdp2prof.commands.report:report", "Write a run's report as one offline HTML file."),
}

_ALIASES = {"analyse": "analyze"}


class _Registry(Group):
    """A group whose verbs are imported on use, so that ``--help`` stays instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = _ALIASES.get(cmd_name, cmd_name)
        if verb not in _VERBS:
            return None
        module, attribute = _VERBS[verb][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _VERBS.items()])


@click.group(cls=_Registry, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fsdp2prof")
def cli() -> None:
    """Profile PyTorch FSDP2: exposed communication, peak memory, and what a run will need."""


def main() -> None:
    """Entry point: run the command and turn every known error into one line and its exit code."""
    open_streams()
    # A trace becomes millions of objects that all stay: the collector would walk them again and again.
    gc.set_threshold(50_000, 20, 20)
    try:
        code = cli.main(prog_name="fsdp2prof", standalone_mode=False)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        say(said.getvalue().rstrip("\n"))
        code = error.exit_code
    except click.Abort:
        code = 130
    except Fsdp2ProfError as error:
        say(f"error: {error}")
        code = error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:  # a disk that fails, a folder that may not be read
        say(f"error: {error.filename or 'input or output'}: {error.strerror or error}")
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
