"""The nodes of zoo_behaviours under other names, for a server's own process."""

import importlib.util
from pathlib import Path

_file = Path(__file__).resolve().parent.parent / "zoo_behaviours" / "__init__.py"
_spec = importlib.util.spec_from_file_location("zoo_behaviours_of_the_host", _file)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

NODE_CLASS_MAPPINGS = {name.replace("Zoo", "ZooHost"): cls for name, cls in _module.NODE_CLASS_MAPPINGS.items()}
