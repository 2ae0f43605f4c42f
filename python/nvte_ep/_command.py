"""The command `nvte-ep`, which the package carries."""

import os
import pathlib
import sys


def main() -> None:
    program = pathlib.Path(__file__).resolve().parent / "bin" / "nvte-ep"
    os.execv(program, [str(program), *sys.argv[1:]])
