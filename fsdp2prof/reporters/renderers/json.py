"""JSON: the result itself, as the document's builder got it."""

from __future__ import annotations

import re

import msgspec

from fsdp2prof.reporters.document import Document
from fsdp2prof.reporters.renderers.base import RenderOptions

__all__ = ["JsonRenderer"]

_UNPRINTABLE = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""What a terminal may obey and JSON lets stand: delete, C1 controls, directions."""


class JsonRenderer:
    """The documented JSON: indented, keys in the order of the contract, with a final newline."""

    extension = ".json"
    binary = False
    page = False

    def render(self, document: Document, options: RenderOptions) -> str:
        """Encode the dataclass that the document was made from."""
        text = msgspec.json.format(msgspec.json.encode(document.result), indent=2).decode()
        return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"
