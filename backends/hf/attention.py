"""Attention in which heads that share keys and values read them from one place.

transformers copies keys and values for each head that reads them wherever there is a mask, as no
fast kernel of a GPU does without. That of a CPU does, and the copies, of all that a prompt sees,
take longer than what is computed of them.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

# Untyped on purpose: their annotations differ from release to release.
transformers: Any = importlib.import_module("transformers")
sdpa: Any = importlib.import_module("transformers.integrations.sdpa_attention")

logger = logging.getLogger(__name__)

_MORE: Final = ("output_attentions", "position_bias", "softcap")
"""What transformers' own does besides, or refuses."""


def share_keys(device: torch.device) -> None:
    """Have models attend so whose attention is transformers' ``sdpa``: on a CPU, in this process.

    Nothing changes where this torch has no such kernel.
    """
    if device.type == "cpu" and _is_fast():
        transformers.AttentionInterface.register("sdpa", attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' own: `query` [batch, heads, queries, dim], `key` and `value` [batch, heads
    of theirs, columns, dim] to [batch, queries, heads, dim]."""
    if (
        attention_mask is None
        or query.device.type != "cpu"
        or query.shape[1] == key.shape[1]
        or any(_is_asked(options.get(name)) for name in _MORE)
    ):
        found: tuple[torch.Tensor, None] = sdpa.sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return found
    attended = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def _is_asked(option: object) -> bool:
    return option is not None and option is not False


def _is_fast() -> bool:
    """Whether torch's fast kernel for CPUs takes a mask where heads share keys."""
    query, shared = torch.zeros(1, 2, 2, 8), torch.zeros(1, 1, 2, 8)
    choose: Any = getattr(torch, "_fused_sdp_choice", None)
    try:
        chosen = choose(query, shared, shared, torch.zeros(1, 1, 2, 2), enable_gqa=True)
    except Exception as error:  # it is no public name, and of each release's own form
        logger.debug("keys are copied for each head that reads them: %r", error)
        return False
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)
