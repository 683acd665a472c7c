"""Activations that vLLM's classes have otherwise than their models."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.layers.activation import XIELU, get_act_fn
from vllm.model_executor.models import bloom


@functools.cache
def put_activations_right() -> None:
    """Have the models that are made in this process from now on have their own."""
    _keep_xielu_exact()
    bloom.get_act_fn = _gelu_of_bloom


def _keep_xielu_exact() -> None:
    """Keep the two numbers of each xIELU, Apertus's, in the model's own dtype: not in bfloat16.

    Relies on `XIELU.__init__` taking a `dtype`, and on models being made while torch's default
    dtype is theirs.
    """
    make = XIELU.__init__

    @functools.wraps(make)
    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807
        make(self, *given, **{"dtype": torch.get_default_dtype(), **named})

    XIELU.__init__ = __init__


def _gelu_of_bloom(name: str) -> torch.nn.Module:
    """Bloom's GELU is by tanh. Relies on its module's `get_act_fn` making no other."""
    if name != "gelu":
        raise ValueError(f"Bloom's activation is {name!r} in this vLLM: 'gelu' expected")
    found: torch.nn.Module = get_act_fn("gelu_pytorch_tanh")
    return found
