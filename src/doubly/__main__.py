"""python -m doubly"""

import sys

from doubly.cli import main


def run() -> None:
    sys.exit(main())


if __name__ == "__main__":
    run()
