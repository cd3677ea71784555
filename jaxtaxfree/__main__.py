"""`python -m jaxtaxfree doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxtaxfree")
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser("doctor", help="say what works on this machine, and how to mend what does not")
    if parser.parse_args(arguments).command is None:
        parser.print_help()
        return 0

    from jaxtaxfree import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
