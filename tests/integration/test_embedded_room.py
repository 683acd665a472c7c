"""An embedded pool where there is no room for it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import lmpool
from lmpool.errors import PoolError
from tests.support.workers import clean_environment

pytestmark = pytest.mark.usefixtures("server_binary")

PROGRAM = """
import os, sys, lmpool
folder, left = os.environ["TMPDIR"], int(sys.argv[1])
filling = os.open(folder + "/filling", os.O_CREAT | os.O_WRONLY)
room = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
os.posix_fallocate(filling, 0, room - left)
try:
    lmpool.embedded(engine="mock", start_timeout=60)
except lmpool.errors.PoolError as error:
    print("PoolError:", error)
    print("left:", sorted(os.listdir(folder)))
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


def test_where_no_folder_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/lmpool-x")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(PoolError, match=r"No space left on device.*let TMPDIR name"):
        lmpool.embedded(engine="mock")
