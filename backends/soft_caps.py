"""Soft caps on the scores of attention, which transformers' ``sdpa`` passes over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lmpool.errors import SettingsError

CAP: Final = "attn_logit_softcapping"


def capped_attention(config: Any, given: Mapping[str, Any]) -> dict[str, str]:
    """What `from_pretrained` is told beside what it is `given`, so that it heeds such caps: nothing
    for a model without.

    Releases of transformers choose ``sdpa`` for some that have them. Raises `SettingsError` where
    that is asked for.
    """
    cap = getattr(config.get_text_config(decoder=True), CAP, None)
    asked = given.get("attn_implementation")
    if cap is None or asked not in (None, "sdpa"):
        return {}
    if asked is not None:
        raise SettingsError(
            f"attn_implementation={asked!r}: it passes over {CAP}={cap!r} of config.json, and rows "
            "would be others; write 'eager', or leave it out"
        )
    return {"attn_implementation": "eager"}
