"""New files patch by patch: a package of ours may come with several of them.

Its ``__init__.py`` stands in this repository as it is in the end. In each commit it imports the modules that are there by
then, so that every patch can bring the module whose functions it calls.
"""

import ast
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

from .series import Patch


def new_files(patches: Sequence[Patch], order: int) -> dict[str, bytes]:
    """Path -> content of what the patch with that number adds, and of each ``__init__.py`` that imports something of it."""
    new = dict(file for add in patches[order].adds for file in add.files())
    there = {path: data for patch in patches[:order] for add in patch.adds for path, data in add.files()} | new
    for folder in {PurePosixPath(path).parent.as_posix() for path in new}:
        init = f"{folder}/__init__.py"
        if init in there:
            now = so_far(there[init], folder, there)
            if init in new or now != so_far(there[init], folder, there.keys() - new.keys()):
                new[init] = now
    return new


def so_far(init: bytes, folder: str, there: Collection[str]) -> bytes:
    """`init`, the ``__init__.py`` of `folder`, without its imports from modules of `folder` that are not `there`."""
    lines = init.splitlines(keepends=True)
    for node in reversed(ast.parse(init).body):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            if any(f"{folder}/{module}.py" not in there for module in modules):
                del lines[node.lineno - 1:node.end_lineno]
    return b"".join(lines)
