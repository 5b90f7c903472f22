"""Whether a server runs from a built tree: looked up in the system, whoever started it and whichever ledger it uses."""

import os
from pathlib import Path

from .locking import held

DATABASE = Path("user") / "comfyui.db"
"""Where a server keeps its database in its own tree, whatever its base directory is."""


def servers(tree: Path) -> list[int]:
    """The ids of the processes that run the `main.py` of `tree`; none where the system has no /proc, or does not let us look."""
    tree = tree.resolve()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            program, *arguments = (process / "cmdline").read_bytes().split(b"\0")
            place = Path(os.readlink(process / "cwd"))
        except OSError:
            continue
        if b"python" not in os.path.basename(program):
            continue        # an editor that has the file open
        scripts = [place / os.fsdecode(argument) for argument in arguments if os.path.basename(argument) == b"main.py"]
        if any(script.resolve() == tree / "main.py" for script in scripts):
            found.append(int(process.name))
    return sorted(found)


def database_in_use(tree: Path) -> bool:
    """Whether a server has the database of `tree` locked."""
    return held((tree / DATABASE).with_name(f"{DATABASE.name}.lock"))


def describe(tree: Path) -> str:
    """What runs from `tree`, in words; empty: nothing that can be seen."""
    pids = servers(tree)
    if pids:
        return f"{'a server runs' if len(pids) == 1 else 'servers run'} from it (pid {', '.join(map(str, pids))})"
    return "a server runs from it (its database is locked)" if database_in_use(tree) else ""
