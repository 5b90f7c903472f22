import os
import sys

assert "torch" not in sys.modules
os.environ["ZOO_PRESTARTUP"] = str(os.getpid())
