"""Settings as the variables in which a started process finds them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from lmpool.checks import quoted, said
from lmpool.errors import SettingsError
from lmpool.settings import PREFIX


def as_variables(settings: Mapping[str, object]) -> dict[str, str]:
    """``LMPOOL_*`` variables that say what `settings` say; None says nothing."""
    return {
        f"{PREFIX}{name.upper()}": _as_text(name, value)
        for name, value in settings.items()
        if value is not None
    }


def _as_text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (dict, list, tuple)):
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingsError(
                f"{name}={quoted(value, 200)}: {said(error)}; it must fit into JSON"
            ) from None
    return str(value)
