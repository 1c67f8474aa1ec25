"""Changes that the site makes to the pages: links out of docs/ become paths, roles in docstrings names."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+((?!docs/)[^)]*)\)")
"""A link to a file of the repository outside the site."""
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):<code>~?([^<]*)</code>")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files beside docs/ into their paths."""
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
