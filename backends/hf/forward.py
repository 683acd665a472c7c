"""The forward pass of a transformers model: from several prompts to the logits after each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.device import to_device
from lmpool.backends.engine import Tokens
from lmpool.backends.grouping import forward_passes
from lmpool.backends.hf.head import Head
from lmpool.backends.hf.numbers import Number
from lmpool.backends.hf.packed_layout import QUERY_BLOCK, leaves_one

Indices = npt.NDArray[np.int64]

# By how much of its largest logit a prompt in company may differ from the same prompt alone.
_TOLERANCE: Final = 2e-4
_TOLERANCE_HALF_PRECISION: Final = 0.1
_TOLERANCE_SAME_SHAPES: Final = 0.01
_LEAST_LOGIT: Final = 0.1


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which prompts may share a forward pass: those `alike` in length, or any, `padded`.

    Prompts of up to `limit` tokens share none with longer ones, which may be padded among
    themselves where `padded_beyond`. `reason` says why it is not all of them.
    """

    alike: bool = True
    padded: bool = True
    limit: int = 1 << 62
    padded_beyond: bool = True
    reason: str = ""


class Forward:
    """Runs a causal language model for the logits after each of several prompts.

    Prompts are padded on the right, where a causal model never looks from a prompt's own tokens:
    the padding needs no mask, models without position ids or with a recurrent state are right too,
    and attention keeps its fastest kernels. The head sees the last position of each prompt only.

    Not every model bears that: which prompts may share a call is `sharing`, to be measured.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.name = type(model).__name__
        self.embedded = int(model.get_input_embeddings().weight.shape[0])
        self.special = _special_tokens(model.config, self.embedded)
        """Token ids that the model may treat in a way of their own."""
        self.sharing = Sharing()
        self.query_block = QUERY_BLOCK if device.type == "cuda" else None
        self.places = 0
        """The longest prompt, once it is known: what is padded is no longer."""
        self.numbers: list[Number] = []
        """Those of the model that may be lengths, from where it computes otherwise."""
        self._model: Any = model
        self._device = device
        self.head: Head | None = Head(model)

    def __call__(self, prompts: Sequence[Tokens]) -> torch.Tensor:
        """The logits after each prompt [prompts, vocab], in the dtype that the head gives them."""
        assert self.head is not None
        outputs, inputs = self._outputs(prompts, [1] * len(prompts))
        with torch.inference_mode():
            return self.head.logits(to_device(outputs, self._device), **inputs)

    def blocks(
        self, prompts: Sequence[Tokens], counts: Sequence[int], rows: int
    ) -> Iterator[torch.Tensor]:
        """The logits after each of so many of the prompts' last tokens, prompt by prompt.

        They come in blocks [rows, vocab] of which the last may be shorter.
        """
        assert self.head is not None
        outputs, inputs = self._outputs(prompts, counts)
        with torch.inference_mode():
            yield from self.head.blocks(to_device(outputs, self._device), rows, **inputs)

    def _outputs(
        self, prompts: Sequence[Tokens], counts: Sequence[int]
    ) -> tuple[Indices, dict[str, Any]]:
        """The places of the wanted logits, and what the model is called with."""
        longest = max(prompt.size for prompt in prompts)
        sharing = self.sharing
        if (
            leaves_one(longest, self.query_block)
            and self.places
            and longest not in (self.places, sharing.limit)
            and sharing.padded
            and sharing.padded_beyond
        ):
            longest += 1
        padded = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: prompt.size] = prompt
        ends = [at * longest + prompt.size for at, prompt in enumerate(prompts)]
        places = [np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)]
        inputs = {"input_ids": to_device(padded, self._device), "use_cache": False}
        return np.concatenate(places), inputs

    def groups(
        self, lengths: Sequence[int], *, forward_tokens: int, vocab_size: int
    ) -> list[list[int]]:
        """Part prompts into calls of about `forward_tokens` positions; indices into `lengths`."""
        sharing = self.sharing
        if not sharing.alike:
            return [[i] for i in range(len(lengths))]
        short = [i for i, length in enumerate(lengths) if length <= sharing.limit]
        long = [i for i, length in enumerate(lengths) if length > sharing.limit]
        return [
            [part[i] for i in group]
            for part, may_pad in ((short, sharing.padded), (long, sharing.padded_beyond))
            for group in forward_passes(
                [lengths[i] for i in part],
                forward_tokens=forward_tokens,
                vocab_size=vocab_size,
                may_pad=may_pad,
            )
        ]

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
        return self.every(prompt)[-1]

    def every(self, prompt: Tokens) -> torch.Tensor:
        """The logits after each beginning of a prompt [length, vocab], computed as `alone`."""
        return self._plain(prompt[None])[0]

    def placed(self, prompts: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> torch.Tensor:
        """The logits [prompts, length, vocab] of tokens, both of one shape, at such positions."""
        return self._plain(prompts, position_ids=to_device(places, self._device))

    def _plain(self, prompts: np.ndarray[Any, Any], **inputs: torch.Tensor) -> torch.Tensor:
        ids = to_device(prompts.astype(np.int64), self._device)
        with torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False, **inputs).logits
            return logits

    def difference(
        self, logits: torch.Tensor, plain: torch.Tensor, *, same_shapes: bool = False
    ) -> float | None:
        """By how much logits differ from `plain` ones; None where it is no more than rounding.

        Of which there is hardly any where both come of forward passes of the `same_shapes`.
        """
        half = _TOLERANCE_SAME_SHAPES if same_shapes else _TOLERANCE_HALF_PRECISION
        exact = self._model.dtype in (torch.float32, torch.float64)
        tolerance = _TOLERANCE if exact else half
        alone = plain.float()
        finite = alone.isfinite()
        if not finite.any():
            return None  # that is for the rows to show
        difference = (logits.float() - alone).abs_()
        if not finite.all():  # to pick those takes longer than all the rest
            difference, alone = difference[finite], alone[finite]
        error = float(difference.nan_to_num_(torch.inf, torch.inf).max())
        largest = float(alone.abs().max())
        return error if error > tolerance * max(_LEAST_LOGIT, largest) else None


def _special_tokens(config: Any, embedded: int) -> list[int]:
    """Those that a configuration names, that of padding first."""
    text = config.get_text_config()
    names = ("pad_token_id", "pad_index", "eos_token_id", "bos_token_id")
    found = [getattr(text, name, None) for name in names]
    return list(dict.fromkeys(t for t in found if type(t) is int and 0 <= t < embedded))
