"""What SKILL.md tells an agent to run."""

from __future__ import annotations

import re
from importlib.resources import files

__all__ = ["skill_commands"]


def skill_commands() -> list[str]:
    """Return the lines of its shell blocks, in order."""
    text = files("fsdp2prof.agents").joinpath("SKILL.md").read_text(encoding="utf-8")
    return "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
