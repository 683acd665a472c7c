"""The registry of adapters, which each shard has: what was done last with each name."""

from __future__ import annotations

from typing import Final, NamedTuple

REMOVED_MS: Final = 86_400_000
"""How long a removal is known: as long as a shard may come back that knows nothing of it."""

_DIGITS: Final = 15
"""A version has no more: milliseconds since 1970 for thirty thousand years."""


class Change(NamedTuple):
    """What was done with a name: it was registered, or removed where there is no `fingerprint`. The
    greater of two is the newer one, whichever clocks there were."""

    version: int
    """Milliseconds since 1970, or more where that is not more than a former one."""
    fingerprint: bytes
    folder: bytes

    @classmethod
    def parse(cls, entry: bytes) -> Change:
        """What an entry says; one that nobody here wrote is older than all."""
        fingerprint, _, folder = entry.partition(b"\n")
        version, line, rest = folder.partition(b"\n")
        if line and version.isdigit() and len(version) <= _DIGITS:
            return cls(int(version), fingerprint, rest)
        return cls(0, fingerprint, folder)

    def pack(self) -> bytes:
        """As the entry of its name."""
        return b"%b\n%d\n%b" % (self.fingerprint, self.version, self.folder)

    @property
    def removed(self) -> bool:
        """Whether the name stands for no adapter since."""
        return not self.fingerprint and self.version > 0
