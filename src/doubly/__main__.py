"""python -m doubly"""

import os
import sys

from doubly.cli import main


def run() -> None:
    """Run the command line and end this process with its exit code."""
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Under torchrun a thread of the gloo backend now and then aborts a process that ends normally, and torchrun
        # then calls the run failed. Everything is closed here, so the interpreter need not be torn down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
