"""Lines of the script: how sentences and tables name them, and their parts."""

from __future__ import annotations

import re
from functools import cache

_RECORDED = re.compile(
    r"(?:(?P<call>\S+\(\)) in )?(?P<file>.+):(?P<line>\d+) \((?P<function>.+?)(?P<hook>, a hook)?\)"
)
"""A line as the recorder writes it: ``f() in a.py:7 (g)``."""
_PROFILED = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")
"""A line as the profiler writes it: ``a.py(7): g``."""
_OUTERMOST = "<module>"
_LONGEST = 1024
"""Characters of a line; longer texts are not of a recorder or profiler, and take time to search."""

SITE = re.compile(
    r"(?:(?P<call>\S+)\(\) \()?(?P<file>[^()]+):(?P<line>\d+)(?: in (?P<function>[^()]+)\(\))?"
    r"(?P<hook>, a hook)?\)?"
)
"""A line as :func:`site_name` writes it; without a function it is one of the script's outermost."""


@cache
def site_name(line: str) -> str:
    """Return a recorded line as users read it: ``a.py:7 in g()``; if it calls ``f``, ``f() (a.py:7 in g())``.

    Other texts stay as they are.
    """
    found = None
    if 0 < len(line) <= _LONGEST:
        found = _RECORDED.fullmatch(line) or _PROFILED.fullmatch(line)
    if found is None:
        return line
    parts = found.groupdict()
    within = "" if parts["function"] == _OUTERMOST else f" in {parts['function']}()"
    place = f"{parts['file']}:{parts['line']}{within}{parts.get('hook') or ''}"
    return f"{parts['call']} ({place})" if parts.get("call") else place


def without_call(site: str) -> str:
    """Return only the place of a site: ``a.py:7 in g()``, whatever is called there."""
    return site.partition("() (")[2].removesuffix(")") or site
