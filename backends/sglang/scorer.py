"""Texts scored in SGLang's forward passes, by what it computes of prompts for itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.device import HostCopies
from lmpool.backends.text_scores import PartialScores, Span, block_rows, reduce_pieces
from lmpool.wants import Score, TextScores


class Scorer:
    """Scores those requests of each batch that were begun as texts, until they are taken.

    SGLang is asked for the log-probabilities of a prompt from a position on. It then reads of its
    cache what stands before, and shows the states from there on to a processor of its own, which
    this one stands in for: it computes no log-probability itself. `batch` gives the requests that
    are running.

    Relies on `logits_processor.input_logprob_processor` of the model, whose `forward` is given the
    wanted states of all requests, one after another, and returns the logits that are sampled from.
    """

    def __init__(self, model_runner: Any, vocab_size: int, batch: Callable[[], Sequence[Any]]):
        processing: Any = importlib.import_module("sglang.srt.layers.logprob_processor")
        self._result = processing.LogprobResult
        device = torch.device(model_runner.device)
        self.block_rows = block_rows(device, vocab_size)
        self._vocab_size = vocab_size
        self._copies = HostCopies(device)
        self._batch = batch
        self._texts: dict[str, PartialScores] = {}
        model_runner.model.logits_processor.input_logprob_processor.forward = self._forward

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, name: str) -> bool:
        return name in self._texts

    def begin(self, name: str, want: Score, targets: npt.NDArray[np.uint32]) -> None:
        """Score the request of this name, whose prompt is the text without its last token."""
        self._texts[name] = PartialScores(want, targets)

    def take(self, name: str) -> tuple[TextScores | None, float]:
        """What came of a text, as `PartialScores.read` has it."""
        return self._texts.pop(name).read()

    def forget(self, name: str) -> None:
        """Drop a request, where it is a text."""
        self._texts.pop(name, None)

    def _forward(
        self,
        *,
        pruned_states: torch.Tensor,
        sample_indices: torch.Tensor,
        input_logprob_indices: torch.Tensor,
        lm_head: Any,
        get_logits_fn: Callable[..., torch.Tensor],
        logits_metadata: Any,
        **_: Any,
    ) -> tuple[Any, torch.Tensor]:
        """In place of `InputLogprobProcessor.forward`."""

        def head(states: torch.Tensor) -> torch.Tensor:
            logits = get_logits_fn(states, lm_head, logits_metadata, use_logits_buffer=False)
            return logits[:, : self._vocab_size]

        pieces, row = [], 0
        for request, length, start in zip(
            self._batch(),
            logits_metadata.extend_seq_lens_cpu,
            logits_metadata.extend_logprob_start_lens_cpu,
            strict=True,
        ):
            count = length - start
            text = self._texts.get(request.rid)
            if count and text is not None:
                piece = text.wanted(Span(row, request.prefix_len + start, count))
                if piece is not None:
                    pieces.append(piece)
            row += max(1, count)  # the last one is there to be sampled from
        if pieces:
            reduce_pieces(pieces, pruned_states, head, self.block_rows, self._copies)
        nothing = pruned_states.new_zeros(len(input_logprob_indices), dtype=torch.float32)
        return self._result(token_logprobs=nothing), head(pruned_states[sample_indices])
