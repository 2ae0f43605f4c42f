"""The command `nvte-ep`, which the package nvte_ep carries. Imports nothing of it, so it needs no PyTorch."""

import importlib.util
import os
import pathlib
import sys


def main() -> None:
    package = pathlib.Path(importlib.util.find_spec("nvte_ep").origin).parent
    # A wheel has no links, so the host runtime is there under its versioned name alone.
    os.environ["NVTE_EP_HOST_LIB"] = os.environ.get("NVTE_EP_HOST_LIB") or str(package / "lib" / "libnvte_ep_host.so.1")
    program = str(package / "bin" / "nvte-ep")
    os.execv(program, [program, *sys.argv[1:]])
