"""A pack with a language-model server of its own, as docs/provider-api.md has it; the test puts the page's code beside this file."""

import atexit
import os
import pathlib
import subprocess
import sys

import comfy.model_management as mm
from comfy import process_memory

from .language_model import LanguageModel

_server = subprocess.Popen([sys.executable, str(pathlib.Path(__file__).with_name("server.py")), os.environ["COMFY_VIRTUAL_CARD_FILE"]],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
atexit.register(_server.kill)
mm.register_process_memory_provider(LanguageModel(_server, process_memory.devices.key(mm.get_torch_device())))

NODE_CLASS_MAPPINGS = {}
