"""The forward pass of a transformers model: from several prompts to the logits after each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from lmpool.backends.engine import Tokens
from lmpool.backends.hf.device import to_device

logger = logging.getLogger(__name__)

# By how much of its largest logit a prompt in company may differ from the same prompt alone.
_TOLERANCE: Final = 1e-3
_TOLERANCE_HALF_PRECISION: Final = 0.1


class Head:
    """A model's forward pass whose head sees the wanted positions alone.

    `logits_to_keep` would do the same, if it took other positions for each prompt in every release
    and every model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._wanted: torch.Tensor | None = None
        self._narrowed = False
        self._hook: Any = None
        self._attach()

    def logits(self, wanted: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """The logits [wanted, vocab] at places `wanted` of the flattened [rows, positions]."""
        self._wanted, self._narrowed = wanted, False
        try:
            logits: torch.Tensor = self._model(**inputs).logits
        finally:
            self._wanted = None
        return logits[:, 0] if self._narrowed else logits.flatten(0, 1)[wanted.to(logits.device)]

    def close(self) -> None:
        """Let the head see all positions again; `logits` picks the wanted ones afterwards."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def follow(self) -> None:
        """Heed that an adapter may have put another module in the head's place."""
        if self._hook is not None:
            self._hook.remove()
            self._attach()

    def _attach(self) -> None:
        head = self._model.get_output_embeddings()
        self._hook = None if head is None else head.register_forward_pre_hook(self._narrow)

    def _narrow(
        self, _: object, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        states = inputs[0]
        if self._wanted is None or states.dim() != 3:
            return None
        self._narrowed = True
        at = self._wanted.to(states.device)
        return (states.flatten(0, 1)[at].unsqueeze(1), *inputs[1:])


class Forward:
    """Runs a causal language model for the logits after each of several prompts.

    Prompts are padded on the right, where a causal model never looks from a prompt's own tokens:
    the padding needs no mask, models without position ids or with a recurrent state are right too,
    and attention keeps its fastest kernels. The head sees the last position of each prompt only.

    Both are tried when this is made. A model that then computes otherwise is run without them:
    `may_pad` is False, and only prompts of one length may share a call.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.may_pad = True
        self._model: Any = model
        self._device = device
        self.head: Head | None = Head(model)
        self._try()

    def __call__(self, prompts: Sequence[Tokens]) -> torch.Tensor:
        """The logits after each prompt [prompts, vocab], in the dtype that the head gives them."""
        assert self.head is not None
        lengths = np.array([prompt.size for prompt in prompts])
        longest = int(lengths.max())
        padded = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: prompt.size] = prompt
        last = np.arange(len(prompts)) * longest + lengths - 1
        with torch.inference_mode():
            return self.head.logits(
                to_device(last, self._device),
                input_ids=to_device(padded, self._device),
                use_cache=False,
            )

    def close(self) -> None:
        """Let go of the model."""
        if self.head is not None:
            self.head.close()
        self.head = self._model = None

    def follow(self) -> None:
        """Heed that an adapter may have put another module in the head's place."""
        if self.head is not None:
            self.head.follow()

    def alone(self, prompt: Tokens) -> torch.Tensor:
        """The logits after one prompt [vocab], by a forward pass without any device of ours."""
        placed = torch.from_numpy(prompt[None].astype(np.int64)).to(self._device)
        with torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=placed, use_cache=False).logits
            return logits[0, -1]

    def _try(self) -> None:
        """Compare two prompts of unlike length in company with each of them alone."""
        tokens = int(self._model.get_input_embeddings().weight.shape[0])
        prompts = [np.arange(n, dtype=np.uint32) % tokens for n in (2, 7)]
        error = self.difference(self(prompts), prompts)
        if error is None:
            return
        logger.warning(
            "%s computes other rows for a padded prompt (by %.2g): it runs without padding, which "
            "is slower",
            type(self._model).__name__,
            error,
        )
        self.may_pad = False
        assert self.head is not None
        self.head.close()

    def difference(self, logits: torch.Tensor, prompts: Sequence[Tokens]) -> float | None:
        """By how much these logits [prompts, vocab] differ from those of each prompt alone.

        None where it is no more than rounding.
        """
        exact = self._model.dtype in (torch.float32, torch.float64)
        tolerance = _TOLERANCE if exact else _TOLERANCE_HALF_PRECISION
        alone = torch.stack([self.alone(prompt) for prompt in prompts]).float()
        finite = alone.isfinite()
        if not finite.any():
            return None  # that is for the rows to show
        difference = (logits.float() - alone)[finite].abs()
        error = float(difference.nan_to_num(torch.inf, torch.inf).max())
        return error if error > tolerance * max(1.0, float(alone[finite].abs().max())) else None
