"""A command on a real terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence


def on_terminal(command: Sequence[str], *, columns: int, environment: Mapping[str, str]) -> str:
    """Run a command with stdout and stderr on a pseudo-terminal; return what it wrote, without returns."""
    screen, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env={**os.environ, **environment}
    )
    os.close(inside)
    written = bytearray()
    while chunk := _read(screen):
        written += chunk
    os.close(screen)
    assert process.wait() == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def _read(screen: int) -> bytes:
    try:
        return os.read(screen, 1 << 16)
    except OSError:  # how Linux says that nobody holds the other end any more
        return b""
