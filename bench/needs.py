"""What a benchmark cannot run without. Says so in a line, before a traceback would, and before any arguments are read."""
import importlib.util
import os
import sys


def modules(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{os.path.basename(sys.argv[0])}: needs {' and '.join(missing)}, not installed here; its first lines say how to run it")
