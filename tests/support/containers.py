"""What containers of `deploy/` would run, as processes: each on a loopback address of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from tests.support.ports import node_port
from tests.support.waiting import until

PORT: Final = "6379"
FILES: Final = "/etc/lmpool"


class Containers:
    """Nodes of a cluster, and who forms it, by the commands that containers have.

    `nodes` are commands by host name, `keeper` is that of keep-cluster, `files` what lies in
    /etc/lmpool and `kept` the folder that a node keeps over its end. Names are replaced by
    addresses, which `move` changes, and the port by one that is free.
    """

    def __init__(
        self,
        folder: Path,
        binary: str,
        nodes: Mapping[str, Sequence[str]],
        keeper: Sequence[str],
        files: Mapping[str, str],
        kept: str,
        password: str,
    ) -> None:
        self._folder = folder
        self._binary = binary
        self._nodes = nodes
        self._keeper = keeper
        self._files = files
        self._kept = kept
        self._password = password
        self._network = 1
        self._port = node_port()
        self._running: list[subprocess.Popen[bytes]] = []
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def addresses(self) -> dict[str, str]:
        """The host names, and which address each has at the moment."""
        numbers = enumerate(self._nodes, 11)
        return {name: f"127.0.{self._network}.{number}" for number, name in numbers}

    def here(self, text: str) -> str:
        """A text of a container as it is to be here: names, port, folders."""
        text = text.replace(FILES, str(self._folder / "etc"))
        names = "|".join(sorted(map(re.escape, self._nodes), key=len, reverse=True))
        text = re.sub(rf"(?<![\w./-])({names})(?![\w-])", lambda m: self.addresses[m[1]], text)
        return re.sub(rf":{PORT}\b", f":{self._port}", text)

    def __enter__(self) -> Self:
        (self._folder / "etc").mkdir()
        for name, text in self._files.items():
            path = self._folder / "etc" / name
            path.write_text(text.replace(FILES, str(path.parent)))
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()
        self._running.clear()

    def move(self) -> None:
        """All end, and start again where they have what they kept, and another address."""
        self.__exit__()
        self._network += 1
        self._start()

    def end(self, name: str) -> None:
        """A node is gone, from one moment to the next."""
        process = self._started.pop(name)
        self._running.remove(process)
        process.kill()
        process.wait()

    def begin(self, name: str, *, blank: bool) -> None:
        """A node that ended starts again; `blank`, it has lost what it kept."""
        if blank:
            shutil.rmtree(self._folder / name)
        self._start_node(name)

    @property
    def formed(self) -> Path:
        """What the keeper touches when all is well."""
        return self._folder / "formed"

    @property
    def said(self) -> str:
        """What all of them said."""
        return (self._folder / "log").read_text("utf-8", "replace")

    def _start(self) -> None:
        self.formed.unlink(missing_ok=True)
        for name in self._nodes:
            self._start_node(name)
        found = shutil.which("redis-cli") or shutil.which("valkey-cli")
        assert found is not None
        self._run(
            [self.here(word) for word in self._keeper],
            {"REDISCLI_AUTH": self._password, "EVERY": "1", "FORMED": str(self.formed)},
        )
        try:
            until(self.formed.exists, 60, what="the cluster to be formed", every=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.said}") from None

    def _start_node(self, name: str) -> None:
        own = self._folder / name
        own.mkdir(exist_ok=True)
        address = self.addresses[name]
        mine = {self._kept: str(own), "*": address}
        words = [mine.get(word, self.here(word)) for word in self._nodes[name]]
        # A container's connections come from its own address.
        own_way = ["--port", str(self._port), "--bind-source-addr", address]
        self._run([self._binary, *words[1:], *own_way])
        self._started[name] = self._running[-1]
        until(lambda: self._listens(address), what=f"{name} to listen", every=0.02)

    def probe(self, name: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """What a probe of this node's container, with the administrator's password, says."""
        words = [self.here(word.replace("127.0.0.1", name)) for word in command]
        env = {**os.environ, "REDISCLI_AUTH": self._password}
        return subprocess.run(words, capture_output=True, text=True, timeout=60, env=env)

    def _run(self, command: Sequence[str], given: Mapping[str, str] | None = None) -> None:
        with (self._folder / "log").open("ab") as log:
            self._running.append(
                subprocess.Popen(
                    command, stdout=log, stderr=log, env={**os.environ, **(given or {})}
                )
            )

    def _listens(self, address: str) -> bool:
        assert all(process.poll() is None for process in self._running), self.said
        with socket.socket() as probe:
            return probe.connect_ex((address, self._port)) == 0
