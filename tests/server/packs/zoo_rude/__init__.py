"""A pack in the server that leaves the process as careless packs do: another folder, a `utils` of its own before ComfyUI's."""

import os
import sys
from pathlib import Path

import folder_paths

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.chdir(HERE.parent)
# Whoever runs main.py again empties the folder.
(Path(folder_paths.get_temp_directory()) / "of_this_start").mkdir(parents=True, exist_ok=True)
NODE_CLASS_MAPPINGS = {}
