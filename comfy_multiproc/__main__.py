"""python -m comfy_multiproc"""

import sys

# Everything below needs 3.11; an older interpreter must still be able to read this file and say so.
if sys.version_info < (3, 11):
    sys.stderr.write(
        "comfy_multiproc: error: Python 3.11 or newer is needed, and this is %d.%d (%s): run the same command with a newer python\n"
        % (sys.version_info[0], sys.version_info[1], sys.executable)
    )
    sys.exit(2)

from comfy_multiproc.commands import main

if __name__ == "__main__":
    sys.exit(main())
