"""Builds the wheel: the package, and the libraries and the command that `cargo build --release` has made.

NVTE_EP_LIBRARY_DIR names a folder with them (`packaging/build.sh` prints one); without it they are built here. They need nothing of
torch or Python, so one wheel serves every version of both.
"""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent.parent
# File in the library folder -> its place in the package.
FILES = {
    "libtransformer_engine.so": "lib/libtransformer_engine.so",
    "libnvte_ep.so": "lib/libnvte_ep.so.1",
    "libnvte_ep_host.so": "lib/libnvte_ep_host.so.1",
    "nvte-ep": "bin/nvte-ep",
}


def version() -> str:
    return re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]


def built() -> pathlib.Path:
    folder = os.environ.get("NVTE_EP_LIBRARY_DIR")
    if folder:
        return pathlib.Path(folder)
    subprocess.run(["cargo", "build", "--release", "--locked"], cwd=ROOT, check=True)
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"


class WithLibraries(build_py):
    def run(self) -> None:
        super().run()
        folder = built()
        for source, place in FILES.items():
            target = pathlib.Path(self.build_lib, "nvte_ep", place)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / source, target)
            target.chmod(0o755)
        # `nvte-ep launch` links the host runtime under these names; a wheel holds no links, and the names are all that it reads.
        names = pathlib.Path(self.build_lib, "nvte_ep", "bin", "host_runtime")
        names.mkdir(exist_ok=True)
        for link in (folder / "host_runtime").iterdir():
            (names / link.name).write_text("")
        for name in ("LICENSE", "THIRD_PARTY_LICENSES"):
            shutil.copyfile(ROOT / name, pathlib.Path(self.build_lib, "nvte_ep", name))


class AnyPython(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class OfOnePlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return True


# A folder of this build alone: what another one left, of other libraries, must not get into the wheel.
scratch = tempfile.TemporaryDirectory(prefix="nvte_ep-")
setup(version=version(), cmdclass={"build_py": WithLibraries, "bdist_wheel": AnyPython}, distclass=OfOnePlatform,
      options={"build": {"build_base": scratch.name}, "egg_info": {"egg_base": scratch.name}})
