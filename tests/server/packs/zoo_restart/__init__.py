"""A pack in the server that replaces its program as managers of packs do, and that wants a worker while it is imported."""

import multiprocessing
import os
import sys

from aiohttp import web
from server import PromptServer

WORKER = {}
if os.environ.pop("ZOO_ASK_AT_IMPORT", None):
    from comfy_multiproc import isolation
    multiprocessing.set_start_method("fork", force=True)
    worker = isolation.named("at_import").worker
    worker.call("unload").result(120)
    WORKER = {"pid": worker.pid, "starts": worker.starts, "method": multiprocessing.get_start_method()}


@PromptServer.instance.routes.get("/zoo/at_import")
async def at_import(request):
    return web.json_response(WORKER)


@PromptServer.instance.routes.post("/zoo/restart")
async def restart(request):
    os.execv(sys.executable, [sys.executable, *sys.argv])


NODE_CLASS_MAPPINGS = {}
