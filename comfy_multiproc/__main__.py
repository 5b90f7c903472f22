"""python -m comfy_multiproc"""

import importlib
import os
import sys

# Everything below needs 3.11; an older interpreter must still be able to read this file and say so.
if sys.version_info < (3, 11):
    sys.stderr.write(
        "comfy_multiproc: error: Python 3.11 or newer is needed, and this is %d.%d (%s): run the same command with a newer python\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(2)

_HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    """Runs a command; a tree with the series has none, and says where they are."""
    if os.path.isdir(os.path.join(_HERE, "commands")):
        return importlib.import_module("comfy_multiproc.commands").main()
    fork = os.path.dirname(_HERE)
    above = [fork]
    while os.path.dirname(above[-1]) != above[-1]:
        above.append(os.path.dirname(above[-1]))
    project = next((folder for folder in above if os.path.isdir(os.path.join(folder, "comfy_multiproc", "commands"))), None)
    where = "in " + project if project else "in the folder of ComfyUI Multiproc that it was built from"
    sys.stderr.write("comfy_multiproc: error: %s is a fork, ComfyUI with the series; the commands are not in it: run them %s\n" % (fork, where))
    return 2


if __name__ == "__main__":
    sys.exit(main())
