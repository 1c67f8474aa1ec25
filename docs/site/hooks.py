"""What the site adds to the pages: each verb's help as it is today, and links out of docs/ as plain paths."""

from __future__ import annotations

import re
from typing import Any

import click

from fsdp2prof.cli import cli

_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?!docs/)[^)]*)\)")
"""A link to a file of the repository that is no page of the site."""
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):<code>~?([^<]*)</code>")
_HELP = re.compile(r"^<!-- help of every command -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the help of the commands; turn links to files beside docs/ into their paths."""
    markdown = _HELP.sub(lambda _: "\n".join(_verbs(cli, "fsdp2prof", None)), markdown)
    depth = page.file.src_uri.count("/")
    return _OUTSIDE.sub(lambda link: link[0] if _is_page(link[0], depth) else _plain(link), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Write the roles of docstrings (``:func:`load```) as plain names."""
    return _ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", html)


def _is_page(link: str, depth: int) -> bool:
    """Whether a link stays inside docs/: it goes up no further than its page is deep."""
    return link.count("../") <= depth


def _plain(link: re.Match[str]) -> str:
    text, path = link[1], link[2].partition("#")[0]
    return f"`{path}`" if text.strip("`") in (path, path.rsplit("/", 1)[-1]) else f"{text} (`{path}`)"


def _verbs(command: click.Command, name: str, parent: click.Context | None) -> list[str]:
    """Return a section for every command below one, with what ``--help`` prints."""
    context = click.Context(command, info_name=name.rsplit(" ", 1)[-1], parent=parent, terminal_width=100)
    if isinstance(command, click.Group):
        below = [command.get_command(context, one) for one in command.list_commands(context)]
        return [
            line for one in below if one is not None for line in _verbs(one, f"{name} {one.name}", context)
        ]
    return [f"## {name}", "", "```text", command.get_help(context), "```", ""]
