"""Rows of the base model beside adapters of the head, on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.platforms import current_platform


@functools.cache
def keep_base_rows() -> None:
    """Have vLLM add no adapter's part to the logits of requests without one.

    For these it has the index -1. Its kernels skip that; on a CPU it is the last slot's, which
    holds an adapter once all are taken. Relies on `PunicaWrapperCPU.add_lora_logits` adding what
    follows linearly from its rows and `sampler_indices`.
    """
    if not current_platform.is_cpu():
        return
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    add = PunicaWrapperCPU.add_lora_logits

    @functools.wraps(add)
    def add_lora_logits(
        self: Any, y: torch.Tensor, x: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        x = x.view(-1, x.shape[-1])
        return add(self, y, x.masked_fill((self.sampler_indices < 0)[:, None], 0), *rest, **more)

    PunicaWrapperCPU.add_lora_logits = add_lora_logits
