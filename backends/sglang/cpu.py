"""SGLang on a machine without a GPU, which is how lmpool tests it.

SGLang's release imports modules that only a GPU has a use for, and pins memory that no GPU reads.
`prepare` stands in for the one and undoes the other; on a machine with a GPU it does nothing.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, Final

import torch

_UNUSED: Final = ("sgl_kernel", "torchvision")
_PINNED: Final = ("arange", "empty", "empty_like", "full", "tensor", "zeros")


@functools.cache
def prepare() -> bool:
    """Make this process ready to import SGLang, once; whether it will compute on the CPU."""
    if torch.cuda.is_available():
        return False
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # It tells of each model whose kernels are not here.
    logging.getLogger("sglang").setLevel(logging.ERROR)
    missing = [name for name in _UNUSED if importlib.util.find_spec(name) is None]
    if missing:
        # transformers asks for these packages by name, and remembers that they are not here.
        available: Any = importlib.import_module("transformers.utils.import_utils")
        available.is_torchvision_available()
        sys.meta_path.append(_StandIns(missing))
    for name in _PINNED:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    _heed_soft_caps()
    return True


def _heed_soft_caps() -> None:
    """Have SGLang's attention for CPUs heed the caps on scores that layers have, as Gemma 2's.

    Relies on `TorchNativeAttnBackend` taking a layer as the fourth argument, and attending by its
    module's `scaled_dot_product_attention`.
    """
    native: Any = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    attend = native.scaled_dot_product_attention
    caps = [0.0]
    """Of the layer that attends."""

    def heeding(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(forward)
        def heeded(
            self: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **more: Any
        ) -> torch.Tensor:
            caps[0] = layer.logit_cap or 0.0
            return forward(self, q, k, v, layer, *rest, **more)

        return heeded

    def attend_capped(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None,
        scale: float | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> torch.Tensor:
        cap = caps[0]
        if not cap:
            found: torch.Tensor = attend(
                query,
                key,
                value,
                attn_mask=attn_mask,
                scale=scale,
                is_causal=is_causal,
                enable_gqa=enable_gqa,
            )
            return found
        heads = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(heads, dim=1) for each in (key, value))
        scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
        scores = cap * (scores / cap).tanh()
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        return scores.softmax(dim=-1) @ value

    native.scaled_dot_product_attention = attend_capped
    backend = native.TorchNativeAttnBackend
    for name in ("forward_extend", "forward_decode"):
        setattr(backend, name, heeding(getattr(backend, name)))


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*arguments, **options)

    return made


class _Anything(type):
    """A class that has every class for an attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _stand_in(name: str) -> Any:
    def call(_: object, *arguments: Any, **__: Any) -> Any:
        # As a decorator it returns what it decorates.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else None

    return _Anything(name, (), {"__init__": lambda *_, **__: None, "__call__": call})


class _Module(types.ModuleType):
    """A module that has every name."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 -- as modules have it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(name)
        setattr(self, name, value)
        return value


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each module of some packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
