"""JSON: the result itself, as the document's builder got it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from fsdp2prof.reporters.document import Document
from fsdp2prof.reporters.renderers import RenderOptions

_UNPRINTABLE = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal may interpret and JSON does not escape: delete, C1 controls, directions."""


class JsonRenderer:
    """The documented JSON: indented, keys in the order of the contract, with a final newline."""

    def render(self, document: Document, options: RenderOptions) -> str:
        """Encode the dataclass that the document was made from."""
        text = msgspec.json.format(_encode(document.result), indent=2).decode()
        return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def _encode(result: Any) -> bytes:
    try:
        return msgspec.json.encode(result)
    except UnicodeEncodeError:  # a file's name that is not UTF-8
        return msgspec.json.encode(_escaped(msgspec.to_builtins(result)))


def _escaped(value: Any) -> Any:
    """Write bytes that are not text as visible codes."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value
