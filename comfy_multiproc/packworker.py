"""How a worker that runs packs starts: what `worker` calls, at its moments. Imports nothing early, for torch has to come late."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import describe

if TYPE_CHECKING:
    from .nodeserver import NodeServer
    from .worker import Context

_server: NodeServer | None = None


def prestartup(context: Context) -> None:
    """Run the packs' prestart-up scripts. Before torch is imported."""
    for pack in context.state["packs"]:
        describe.prestart(Path(pack["path"]))


def before_nodes(context: Context) -> None:
    """Be where core nodes look for the server. After torch, before any node."""
    global _server
    from .nodeserver import NodeServer
    _server = NodeServer(context)
    _server.install()


def load(context: Context) -> dict[str, Any]:
    """Load the packs and be ready for calls; gives what the host needs to know of them, as JSON."""
    assert _server is not None
    return _server.load()
