"""``fsdp2prof report``: one offline HTML file of a run, of traces or of memory snapshots."""

from __future__ import annotations

from pathlib import Path

import click

from fsdp2prof.commands.options import Output, output_options

__all__ = ["report"]


@click.command()
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@output_options("html")
def report(path: Path, *, output: Output) -> None:
    """Write a run's report as one offline HTML file.

    RUN is a run directory; a trace, a memory snapshot or a folder of either gives the part it has.
    """
    with output.progress(f"analysing {path}"):
        from fsdp2prof.analyzers.pipeline import analyze_any_path

        analysis = analyze_any_path(path)
    from fsdp2prof.reporters import html

    output.write(html.render(str(path), analysis))
