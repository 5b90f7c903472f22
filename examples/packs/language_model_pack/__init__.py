"""A language model in a process of its own: this pack starts its server, registers its memory, and has a node that asks it.

Copy this folder into custom_nodes. The server is no ComfyUI and the pack needs no isolation: `provider.py` is all that it takes
for the server's weights to be weighed against ComfyUI's models.
"""

import atexit
import pathlib
import queue
import subprocess
import sys
import uuid

import comfy.model_management as mm
from comfy import process_memory

from .provider import LanguageModel

SIZE = 16 << 20
DEVICE = mm.get_torch_device()

_server = subprocess.Popen([sys.executable, str(pathlib.Path(__file__).with_name("server.py")), str(DEVICE), str(SIZE)],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
atexit.register(_server.kill)
provider = LanguageModel(_server, process_memory.devices.key(DEVICE))
mm.register_process_memory_provider(provider)


class LanguageModelAsk:
    DESCRIPTION = "Has the language model continue a text. Its weights go to the card for that, and stay until something else needs the room."
    CATEGORY = "examples"
    RETURN_TYPES = ("STRING",)
    FUNCTION = "ask"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"text": ("STRING", {"multiline": True})}}

    def ask(self, text):
        if not provider.usage(provider.device).resident:
            mm.free_memory(SIZE, DEVICE)    # as any node that is about to use memory which ComfyUI does not manage
        ticket = uuid.uuid4().hex
        provider.send("ask", ticket, " ".join(text.split()))
        while True:
            mm.throw_exception_if_processing_interrupted()
            try:
                answered, word, said = provider.answers.get(timeout=0.1)
            except queue.Empty:
                if _server.poll() is not None:
                    raise RuntimeError(f"the language-model server has ended with {_server.returncode}") from None
                continue
            if answered == ticket:
                break
        if word == "failed":
            raise RuntimeError(f"the language model could not answer: {said}")
        return (f"{text}, {said}",)


NODE_CLASS_MAPPINGS = {"LanguageModelAsk": LanguageModelAsk}
NODE_DISPLAY_NAME_MAPPINGS = {"LanguageModelAsk": "Ask the Language Model"}
