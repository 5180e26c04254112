"""Which loopback ports the embedded servers take."""

import os
import secrets
import socket
import time

from agentrl_runtime.errors import AgentRLError


def chosen_port(variable: str, before: int | None) -> int:
    """The port that the variable names, else the one of last time, so that clients find it again, else a free one."""
    wanted = os.environ.get(variable)
    if wanted:
        if not wanted.isdecimal() or not 0 < int(wanted) < 65536:
            raise AgentRLError(f"{variable}={wanted} is no port number", mend="use one from 1024 to 65535")
        if not _gets_free(int(wanted)):
            raise AgentRLError(f"port {wanted} of {variable} is in use", mend=f"choose another, or unset {variable}")
        return int(wanted)
    return before if before and _gets_free(before) else free_block(1)


def _gets_free(port: int) -> bool:
    """Whether the port is free, or becomes so while a server that was just killed is cleared away."""
    deadline = time.monotonic() + 3
    while not _is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the servers do it: connections of a server that has just ended do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_block(count: int) -> int:
    """The first of `count` free ports in a row, below the range that outgoing connections take."""
    for _ in range(200):
        base = 12000 + secrets.randbelow(16000)
        if all(_is_free(base + offset) for offset in range(count)):
            return base
    raise AgentRLError("no free block of ports between 12000 and 28000", mend="stop what holds them")
