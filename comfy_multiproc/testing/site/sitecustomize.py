"""Arms the virtual card in a Python process that has this folder on PYTHONPATH and COMFY_VIRTUAL_CARD set."""

import importlib.util
import os
import sys

# The command line has no card itself: it must be found where it is run, and what it starts is armed in turn.
_command_line = sys.orig_argv[1:3] == ["-m", "comfy_multiproc"]

if os.environ.get("COMFY_VIRTUAL_CARD") and not _command_line:
    if "comfy_multiproc" not in sys.modules:
        # By its file, without a new entry on sys.path: an unpatched ComfyUI must find nothing else of this project.
        _root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        _spec = importlib.util.spec_from_file_location("comfy_multiproc", os.path.join(_root, "__init__.py"), submodule_search_locations=[_root])
        assert _spec is not None and _spec.loader is not None
        sys.modules["comfy_multiproc"] = _package = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(_package)
    from comfy_multiproc.testing.card.virtual import install
    install()
