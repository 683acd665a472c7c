"""Hidden states of a transformers model, and the head that makes rows of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from lmpool.backends.engine import Outcome, Request, Tokens
from lmpool.backends.grouping import of_equal_prompts
from lmpool.backends.head_fit import NoHead, fitted, head_or_reason, numbers_of
from lmpool.backends.hf.forward import Forward
from lmpool.backends.hf.packed_layout import Indices
from lmpool.head_form import HeadForm, Numbers
from lmpool.wants import Hidden

_NUMBERS: Final[dict[torch.dtype, Numbers]] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
_BLOCK: Final = 1 << 24
"""Numbers of the matrix that are widened at once."""
PROBES: Final = (1, 3)
"""Tokens of the prompts whose states are looked at."""

F32 = npt.NDArray[np.float32]


class ModelHead:
    """The head of a model, as a matrix that others may apply.

    Raises `NoHead` where the model's logits are not what its matrix makes of its hidden states.
    """

    def __init__(self, model: Any, forward: Forward, vocab_size: int) -> None:
        self._module = _base(model.get_output_embeddings())
        if self._module is None:
            raise NoHead("it has no head of its own")
        weight = self._weight()
        if weight.dim() != 2 or weight.shape[0] != vocab_size or weight.dtype not in _NUMBERS:
            raise NoHead(f"its head is a {type(self._module).__name__}, and no plain matrix")
        assert forward.head is not None
        head, hidden = forward.head, weight.shape[1]
        plainest = [t for t in range(vocab_size) if t not in forward.special] or [0]
        prompts = [np.array(plainest[:size], np.uint32) for size in PROBES]
        with head.giving_states():
            real = torch.cat([forward([prompt]) for prompt in prompts])
        if real.shape[1] != hidden:
            raise NoHead(f"its head sees {real.shape[1]} numbers, and its matrix has {hidden}")

        def logits(states: F32) -> tuple[F32, F32]:
            placed = torch.from_numpy(states).to(weight.device, real.dtype)
            try:
                found, seen = head.after_trunk(placed)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:
                raise NoHead(f"it takes no states without its trunk ({error})") from error
            return _numbers(found), _numbers(seen)

        known = numbers_of(model.config.get_text_config().to_dict())
        plain = torch.stack([forward.alone(prompt) for prompt in prompts])
        with torch.inference_mode():
            self.form: HeadForm = fitted(
                _numbers(real),
                _numbers(plain),
                self._products,
                logits,
                known,
                _NUMBERS[weight.dtype],
                bias=getattr(self._module, "bias", None) is not None,
            )

    def weights(self, rows: slice) -> npt.NDArray[Any]:
        """These rows of the matrix, the bits of bfloat16 as uint16."""
        found = self._weight()[rows].detach().cpu().contiguous()
        bits = found.view(torch.int16) if found.dtype == torch.bfloat16 else found
        rows_found = bits.numpy()
        return rows_found.view(np.uint16) if found.dtype == torch.bfloat16 else rows_found

    def bias(self) -> F32:
        """The bias, float32 [vocab]."""
        return _numbers(self._module.bias.detach())

    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = self._module.weight
        return weight

    def _products(self, states: F32) -> F32:
        """The products [states, vocab] of the matrix, with its bias, in float32."""
        weight = self._weight()
        placed = torch.from_numpy(states).to(weight.device).to(weight.dtype).float()
        rows = max(1, _BLOCK // weight.shape[1])
        parts = [placed @ part.float().T for part in weight.split(rows)]
        found = _numbers(torch.cat(parts, dim=1))
        bias = getattr(self._module, "bias", None)
        return found if bias is None else found + self.bias()


def head_of(model: Any, forward: Forward, vocab_size: int) -> tuple[ModelHead | None, str]:
    """The head of a model, or why there is none that others may apply."""

    def find() -> ModelHead:
        return ModelHead(model, forward, vocab_size)

    fatal = (torch.OutOfMemoryError, torch.AcceleratorError)
    return head_or_reason(type(model).__name__, find, fatal)


def _numbers(tensor: torch.Tensor) -> F32:
    found: F32 = tensor.float().cpu().numpy()
    return found


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
