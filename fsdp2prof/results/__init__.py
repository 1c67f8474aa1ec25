"""Results of analyses: frozen dataclasses whose fields are the JSON contract.

Encoding one of these with ``msgspec.json.encode`` gives the documented JSON. Keys may be added, never
renamed; ``tests/golden`` freezes them. Times are nanoseconds, sizes bytes, rates bytes per second,
fractions 0..1; ``None`` means unknown or undefined, never zero.

Import a result from the module that defines it. For programs outside this package, ``from
fsdp2prof.results import TraceAnalysis`` also works: names are looked up on first use.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        from importlib import import_module
        from pkgutil import iter_modules

        for module in iter_modules(__path__):
            home = import_module(f"{__name__}.{module.name}")
            if name in vars(home):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
