"""Hidden states of a transformers model, and the head that makes rows of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from lmpool.backends.engine import Outcome, Request, Tokens
from lmpool.backends.grouping import of_equal_prompts
from lmpool.backends.head_fit import NoHead, fitted, head_or_reason, numbers_of, probes
from lmpool.backends.hf.forward import Forward
from lmpool.backends.hf.packed_layout import Indices
from lmpool.backends.torch_head import F32, HeadMatrix, as_numbers
from lmpool.head_form import HeadForm
from lmpool.wants import Hidden


class ModelHead:
    """The head of a model, as a matrix that others may apply.

    Raises `NoHead` where the model's logits are not what its matrix makes of its hidden states.
    """

    def __init__(self, model: Any, forward: Forward, vocab_size: int) -> None:
        layer = _base(model.get_output_embeddings())
        if layer is None:
            raise NoHead("it has no head of its own")
        matrix = HeadMatrix(layer, vocab_size, getattr(layer, "bias", None))
        self.weights, self.bias = matrix.weights, matrix.bias
        assert forward.head is not None
        head, hidden = forward.head, matrix.hidden_size
        prompts = probes(vocab_size, forward.special, forward.places)
        with head.giving_states():
            real = torch.cat([forward([prompt]) for prompt in prompts])
        if real.shape[1] != hidden:
            raise NoHead(f"its head sees {real.shape[1]} numbers, and its matrix has {hidden}")

        def logits(states: F32) -> tuple[F32, F32]:
            placed = torch.from_numpy(states).to(matrix.device, real.dtype)
            try:
                found, seen = head.after_trunk(placed)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:
                raise NoHead(f"it takes no states without its trunk ({error})") from error
            return as_numbers(found), as_numbers(seen)

        known = numbers_of(model.config.get_text_config().to_dict())
        plain = torch.stack([forward.alone(prompt) for prompt in prompts])
        with torch.inference_mode():
            self.form: HeadForm = fitted(
                as_numbers(real),
                as_numbers(plain),
                matrix.products,
                logits,
                known,
                matrix.numbers,
                bias=matrix.biased,
            )


def head_of(model: Any, forward: Forward, vocab_size: int) -> tuple[ModelHead | None, str]:
    """The head of a model, or why there is none that others may apply."""

    def find() -> ModelHead:
        return ModelHead(model, forward, vocab_size)

    fatal = (torch.OutOfMemoryError, torch.AcceleratorError)
    return head_or_reason(type(model).__name__, find, fatal)


def _base(module: Any) -> Any:
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


class States:
    """Requests for hidden states by one adapter, as `prompts` to compute, and what comes of them.

    They run as rows do (see `Batch`), through a head that gives states in the place of logits.
    """

    counts: None = None

    def __init__(self, requests: Sequence[Request]) -> None:
        self._asked = of_equal_prompts(requests)
        self.prompts: Final[list[Tokens]] = [asked[0].tokens for asked in self._asked]
        self._outcomes: list[Outcome] = []

    def outcomes(self) -> Iterator[Outcome]:
        """One of each request, once all states were taken and finished."""
        yield from self._outcomes

    def take(
        self, numbers: Sequence[int], depths: Indices, states: torch.Tensor, *, last: bool
    ) -> Any:
        """Begin to make outcomes of states [prompts, hidden]; see `Batch.take`."""
        wide = states.float()

        def finish() -> list[int]:
            again = []
            found = wide.cpu().numpy()
            found.flags.writeable = False
            for number, state in zip(numbers, found, strict=True):
                if last or np.isfinite(state).all():
                    self._outcomes += [Outcome.of_state(r.id, state) for r in self._asked[number]]
                else:
                    again.append(number)
            return again

        return finish


def parted(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Those that want states, and all others."""
    states = [request for request in requests if isinstance(request.want, Hidden)]
    return states, [request for request in requests if not isinstance(request.want, Hidden)]
