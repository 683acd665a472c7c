"""The forward pass of a transformers model: from several prompts to the logits after each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from lmpool.backends.engine import Tokens

logger = logging.getLogger(__name__)

# By how much of its largest logit a padded prompt may differ from the same prompt alone.
_TOLERANCE: Final = 1e-3
_TOLERANCE_HALF_PRECISION: Final = 0.1


class Forward:
    """Runs a causal language model for the logits after each of several prompts.

    Prompts are padded on the right, where a causal model never looks from a prompt's own tokens:
    the padding needs no mask, models without position ids or with a recurrent state are right too,
    and attention keeps its fastest kernels. The head sees the last position of each prompt only.

    Both are tried when this is made. A model that answers otherwise then is run without them:
    `may_pad` is False, and only prompts of one length may share a call.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.may_pad = True
        self._model = model
        self._device = device
        self._last: torch.Tensor | None = None
        self._hook = self._keep_last_positions()
        self._try()

    def __call__(self, prompts: Sequence[Tokens]) -> torch.Tensor:
        """The logits after each prompt [prompts, vocab], in the dtype that the head gives them."""
        lengths = [prompt.size for prompt in prompts]
        padded = np.zeros((len(prompts), max(lengths)), dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: prompt.size] = prompt
        last = torch.tensor(lengths, device=self._device) - 1
        with torch.inference_mode():
            self._last = last
            try:
                logits = self._logits(padded)
            finally:
                self._last = None
            if logits.shape[1] != 1:
                logits = _at(logits, last)
            return logits[:, 0]

    def close(self) -> None:
        """Let go of the model."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._model = None

    def _logits(self, ids: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> torch.Tensor:
        """[prompts, positions, vocab], or of the last positions only while there is a hook."""
        placed = torch.from_numpy(ids).to(self._device)
        logits: torch.Tensor = self._model(input_ids=placed, use_cache=False).logits
        return logits

    def _keep_last_positions(self) -> Any:
        """Have the head see the last position of each prompt alone.

        `logits_to_keep` would do the same, if it took another position for each prompt in every
        release and every model.
        """
        head = self._model.get_output_embeddings()
        if head is None:
            return None

        def narrow(_: object, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            if self._last is None or inputs[0].dim() != 3:
                return None
            return (_at(inputs[0], self._last), *inputs[1:])

        return head.register_forward_pre_hook(narrow)

    def _try(self) -> None:
        """Compare two prompts of unlike length in company with each of them alone."""
        tokens = int(self._model.get_input_embeddings().weight.shape[0])
        prompts = [np.arange(n, dtype=np.uint32) % tokens for n in (2, 7)]
        with torch.inference_mode():
            alone = torch.stack([self._logits(p[None].astype(np.int64))[0, -1] for p in prompts])
            exact = self._model.dtype in (torch.float32, torch.float64)
            tolerance = _TOLERANCE if exact else _TOLERANCE_HALF_PRECISION
            error = (self(prompts).float() - alone.float()).abs().max()
            if not error > tolerance * max(1.0, float(alone.float().abs().max())):
                return
        logger.warning(
            "%s computes other rows for a padded prompt (by %.2g): it runs without padding, which "
            "is slower",
            type(self._model).__name__,
            float(error),
        )
        self.may_pad = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _at(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Of [prompts, positions, width], the given position of each prompt: [prompts, 1, width]."""
    index = torch.arange(states.shape[0], device=states.device)
    return states[index, positions.to(states.device)].unsqueeze(1)
