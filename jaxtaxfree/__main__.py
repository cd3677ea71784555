"""`python -m jaxtaxfree doctor`, `taxes`, `generate` and `compare`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    from jaxtaxfree import doctor, doctor_processes
    from jaxtaxfree.models import commands as generation
    from jaxtaxfree.models import compare
    from jaxtaxfree.taxes import programs

    parser = argparse.ArgumentParser(prog="python -m jaxtaxfree")
    commands = parser.add_subparsers(dest="command", title="commands")
    examination = commands.add_parser("doctor", help="say what works on this machine, and how to mend what does not")
    examination.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="start N processes of one GPU each, and check what works between them",
    )
    programs.add_arguments(
        commands.add_parser("taxes", help="say where the time of XLA's programs and of the fused ones goes")
    )
    generation.add_arguments(
        commands.add_parser("generate", help="continue text by a checkpoint as it was published, on several devices")
    )
    compare.add_arguments(
        commands.add_parser("compare", help="compare a checkpoint's logits with those of transformers")
    )
    match (options := parser.parse_args(arguments)).command:
        case "doctor":
            return doctor.main() if options.processes is None else doctor_processes.main(options.processes)
        case "taxes":
            return programs.main(options)
        case "generate":
            return generation.main(options)
        case "compare":
            return compare.main(options)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
