"""``python -m tests.benchmarks.gpu_wheels FOLDER``: what lmpool needs where nothing is reached.

For a machine that has torch and transformers: the wheels of lmpool's other dependencies, and of a
server, for its Python (`--python`, such as 3.12). `make gpu-wheels` fills the folder, and `make
bench ARGS=gpu` installs from it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MOST: Final = 60_000_000
"""Bytes of all wheels together."""
EXTRAS: Final = ("worker", "metrics", "embedded")
MEASURING: Final = ("psutil",)
"""Of the extra ``dev``."""
PLATFORMS: Final = (
    "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64",
    "manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64",
)  # fmt: skip


def requirements() -> list[str]:
    """What is to be there, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    found = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    found += [each for extra in EXTRAS for each in extras[extra]]
    found += [each for each in extras["dev"] if each.startswith(MEASURING)]
    return [each for each in found if not each.startswith("lmpool[")]


def size(folder: Path) -> int:
    """Bytes of the wheels."""
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))


def fill(folder: Path, python: str) -> None:
    """Download the wheels, in the place of those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"),
            *("--only-binary=:all:", "--implementation", "cp", "--python-version", python),
            *(part for platform in PLATFORMS for part in ("--platform", platform)),
            *("--dest", str(folder), *requirements()),
        ],
        check=True,
    )


def main() -> int:
    """Fill the folder; 1 where it takes more than it may."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu_wheels")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="of that machine")
    given = parser.parse_args()
    fill(given.folder, given.python)
    taken = size(given.folder)
    print(f"{given.folder}: {taken / 1e6:.1f} MB, for Python {given.python} on x86_64 Linux")
    if taken > MOST:
        print(f"that is more than {MOST / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
