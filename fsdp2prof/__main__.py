"""``python -m fsdp2prof``."""

from fsdp2prof.cli import main

main()
