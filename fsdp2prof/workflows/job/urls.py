"""URLs of remote files: messages show the URL, never the path of the local copy.

A URL is shown without user, password and query, which may be secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

T = TypeVar("T")

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_SECRET = re.compile(r"(?P<scheme>://)[^/@\s]*@|\?[^\s,]*")

_COPIES: dict[str, str] = {}
"""Path of a copy -> its URL."""


def is_url(text: str) -> bool:
    """Whether a word of the command line names something elsewhere."""
    return _URL.match(text) is not None


def local_path(url: str) -> Path | None:
    """Return the path of a ``file://`` URL on this machine; None for any other URL."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() != "file":
        return None
    host, slash, path = rest.partition("/")
    return Path(unquote(slash + path)) if host in ("", "localhost") and path else None


def register(copy: Path, url: str) -> None:
    """Register the URL of a local folder or file, for the life of the process."""
    _COPIES[str(copy)] = url.rstrip("/")


def url_of(path: Path) -> str | None:
    """Return the URL that a path represents; None for a local path."""
    for parent in (path, *path.parents):
        url = _COPIES.get(str(parent))
        if url is not None:
            inside = path.relative_to(parent).as_posix()
            return url if inside == "." else f"{url}/{inside}"
    return None


def shown(item: T) -> T:
    """Return a text, a path or a result with URLs in place of the paths of copies."""
    return _shown(item, _COPIES) if _COPIES else item


def hide_secrets(text: str) -> str:
    """Return a text without user, password and query of the URLs in it."""
    return _SECRET.sub(lambda match: match["scheme"] or "", text)


def _shown(item: Any, copies: Mapping[str, str]) -> Any:
    if isinstance(item, str):
        for copy, url in copies.items():
            if copy in item:
                item = item.replace(copy, hide_secrets(url))
        return item
    if isinstance(item, Path):
        return _shown(str(item), copies)
    if isinstance(item, list):
        return [_shown(one, copies) for one in item]
    if isinstance(item, tuple):
        return tuple(_shown(one, copies) for one in item) if type(item) is tuple else item
    if isinstance(item, dict):
        return {_shown(key, copies): _shown(value, copies) for key, value in item.items()}
    if is_dataclass(item) and not isinstance(item, type):
        values = {field.name: getattr(item, field.name) for field in fields(item) if field.init}
        changed = {
            name: new
            for name, old in values.items()
            if (new := _shown(old, copies)) is not old and new != old
        }
        return replace(item, **changed) if changed else item
    return item
