"""Loading of Python files that lie outside every package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from support.present import present

SCRIPTS = Path(__file__).resolve().parents[1] / "integration" / "scripts"
"""What the integration tests train and record."""


def load_script(path: Path, name: str | None = None) -> ModuleType:
    """Run a file as a module, its stem's name unless told; ``sys.modules`` is left as it was."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    module = importlib.util.module_from_spec(present(spec))
    present(present(spec).loader).exec_module(module)
    return module
