"""How a process of lmpool's ends, for whoever would start it again."""

from __future__ import annotations

from typing import Final

EXIT_REFUSED: Final = 78
"""Where starting again cannot help: settings, another model in the pool (sysexits.h: EX_CONFIG)."""
