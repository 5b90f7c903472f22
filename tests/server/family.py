"""The processes of a server under test, seen from outside."""

import os
import time

SOON = 30.0     # generous: the machine that runs this may be busy


def family(server):
    """All processes that were started by this server or that one of its workers has started, by their environment."""
    return _marked(f"COMFY_MULTIPROC_CACHE={server.home / 'cache'}".encode())


def workers(server):
    """Those of the family that are workers, or that a worker has started."""
    return family(server) & _marked(b"COMFY_MULTIPROC_WORKER=", prefix=True)


def _marked(mark, prefix=False):
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and running(int(entry)):
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    variables = file.read().split(b"\0")
            except OSError:
                continue
            if any(v.startswith(mark) if prefix else v == mark for v in variables):
                found.add(int(entry))
    return found


def running(pid):
    """Whether there is such a process that is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, what="", within=SOON):
    """Wait until that is so; it has to become so."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, what or condition
        time.sleep(0.05)
    return value
