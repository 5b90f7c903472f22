"""A pack as managers of prompts are written: a file in the user's folder, routes for its page, a list that grows while the server runs."""

import json
import os

import folder_paths
from aiohttp import web
from server import PromptServer

WEB_DIRECTORY = "./js"
FILE = os.path.join(folder_paths.get_user_directory(), "style_prompts.json")


def saved():
    try:
        with open(FILE, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return {}


@PromptServer.instance.routes.get("/style_prompts")
async def every(request):
    return web.json_response(saved())


@PromptServer.instance.routes.post("/style_prompts/{name}")
async def save(request):
    prompts = {**saved(), request.match_info["name"]: (await request.json())["text"]}
    with open(FILE, "w", encoding="utf-8") as file:
        json.dump(prompts, file)
    PromptServer.instance.send_sync("style_prompts.saved", {"names": sorted(prompts), "pid": os.getpid()})
    return web.json_response({"names": sorted(prompts)})


PromptServer.instance.app.add_routes([web.static("/style_prompts_files", os.path.join(os.path.dirname(os.path.realpath(__file__)), "js"))])


class SavedPrompt:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"name": (sorted(saved()) or ["none"],)}}

    @classmethod
    def IS_CHANGED(cls, name):
        return saved().get(name, "")

    @classmethod
    def VALIDATE_INPUTS(cls, name):
        return True if name in saved() else f"There is no saved prompt {name}."

    RETURN_TYPES = ("STRING",)
    FUNCTION = "read"
    OUTPUT_NODE = True
    CATEGORY = "style/prompts"

    def read(self, name):
        return {"ui": {"text": [saved()[name]], "pid": [os.getpid()]}, "result": (saved()[name],)}


NODE_CLASS_MAPPINGS = {"StyleSavedPrompt": SavedPrompt}
NODE_DISPLAY_NAME_MAPPINGS = {"StyleSavedPrompt": "Saved Prompt"}
