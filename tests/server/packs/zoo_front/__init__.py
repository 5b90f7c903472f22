"""A pack with a page of its own: front-end files, routes, messages, a prompt handler."""

import os
import pathlib

import folder_paths
from aiohttp import web
from server import PromptServer

WEB_DIRECTORY = "./web"

if log := os.environ.get("ZOO_IMPORTS"):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")

folder_paths.add_model_folder_path("zoo_models", str(pathlib.Path(__file__).parent / "web"))
routes = PromptServer.instance.routes
QUEUE = PromptServer.instance.prompt_queue


@routes.get("/zoo/pid")
async def pid(request):
    return web.json_response({"pid": os.getpid(), "prestartup": os.environ.get("ZOO_PRESTARTUP"), "queue": QUEUE.get_tasks_remaining()})


@routes.post("/zoo/echo/{name}")
async def echo(request):
    body = await request.read()
    return web.Response(status=201, body=body[::-1], headers={"X-Zoo": request.match_info["name"], "X-Query": request.query.get("q", "")})


@routes.get("/zoo/stream")
async def stream(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for i in range(4):
        await response.write(bytes([65 + i]) * 1_000_000)
    await response.write_eof()
    return response


@routes.get("/zoo/socket")
async def socket(request):
    ws = web.WebSocketResponse()
    await ws.prepare(request)
    async for message in ws:
        await ws.send_str(message.data.upper())
    return ws


@routes.get("/zoo/unsupported")
async def unsupported(request):
    try:
        PromptServer.instance.user_manager.get_request_user_id(request)
    except AttributeError as error:
        return web.Response(text=str(error))
    return web.Response(text="there is one")


def tag(json_data):
    json_data.setdefault("extra_data", {}).setdefault("extra_pnginfo", {})["zoo"] = os.getpid()
    return json_data


PromptServer.instance.add_on_prompt_handler(tag)


class ZooSends:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"text": ("STRING", {"default": ""}), "file": (folder_paths.get_filename_list("zoo_models") or ["none"],)},
                "hidden": {"id": "UNIQUE_ID", "info": "EXTRA_PNGINFO"}}

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "zoo"

    def run(self, text, file, id=None, info=None):
        PromptServer.instance.send_sync("zoo.said", {"text": text, "node": id, "prompt_id": PromptServer.instance.last_prompt_id})
        PromptServer.instance.send_progress_text(text, id)
        return {"ui": {"tag": [(info or {}).get("zoo")]}}


NODE_CLASS_MAPPINGS = {"ZooSends": ZooSends}
