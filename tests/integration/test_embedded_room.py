"""An embedded pool where there is no room for it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import lmpool
from lmpool.cli.demo.private_cluster import PrivateCluster
from lmpool.errors import PoolError
from tests.support.workers import clean_environment

pytestmark = pytest.mark.usefixtures("server_binary")

FILL = """
import os, sys, lmpool
folder, left = os.environ["TMPDIR"], int(sys.argv[1])
filling = os.open(folder + "/filling", os.O_CREAT | os.O_WRONLY)
room = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
os.posix_fallocate(filling, 0, room - left)
"""
PROGRAM = f"""{FILL}
try:
    lmpool.embedded(engine="mock", start_timeout=60)
except lmpool.errors.PoolError as error:
    print("PoolError:", error)
    print("left:", sorted(os.listdir(folder)))
"""
DEMO = f"""{FILL}
import atexit
from lmpool.cli import app
atexit.register(lambda: print("left:", sorted(os.listdir(folder))))
app(["demo", "--cluster", "--workers", "1"], prog_name="lmpool")
"""


def small_folder(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose TMPDIR is a file system of its own, of 512 KiB; skips where none is."""
    mount = f'mount -t tmpfs -o size=512k none "{folder}" && exec "$@"'
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    return subprocess.run(
        [*inside, sys.executable, "-c", program, *arguments],
        env={**clean_environment(), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def test_a_full_temporary_folder_is_named_and_what_helps(tmp_path: Path) -> None:
    # Where there is no room at all, Python itself takes another folder.
    done = small_folder(tmp_path, PROGRAM, "4096")
    assert "PoolError:" in done.stdout, done.stderr
    assert "let TMPDIR name a folder of another file system" in done.stdout
    assert "left: ['filling']" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_demo_of_a_cluster_names_a_full_temporary_folder_too(tmp_path: Path) -> None:
    done = small_folder(tmp_path, DEMO, "16384")
    assert done.returncode == 2
    assert f"{tmp_path} has no room left: make room, or" in done.stderr.replace("\n", " ")
    assert "left: ['filling']" in done.stdout
    assert "Traceback" not in done.stderr


def _embed() -> None:
    lmpool.embedded(engine="mock")


def _form_a_cluster() -> None:
    with PrivateCluster(3, "none"):
        pass


@pytest.mark.parametrize("begin", [_embed, _form_a_cluster])
def test_where_no_folder_can_be_made(
    begin: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/lmpool-x")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(PoolError, match=r"No space left on device.*let TMPDIR name"):
        begin()


@pytest.mark.parametrize("begin", [_embed, _form_a_cluster])
def test_where_nothing_can_be_written_in_it(
    begin: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(PoolError, match=r"No space left on device.*let TMPDIR name"):
        begin()
    assert not list(tmp_path.iterdir())
