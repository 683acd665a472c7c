"""The head of an MLX model, as a matrix that makes rows of hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lmpool.backends.engine import Tokens
from lmpool.backends.head_fit import NoHead, fitted, head_or_reason, numbers_of, probes
from lmpool.backends.mlx.model import Forward, mx, nn
from lmpool.head_form import HeadForm, Numbers

_NUMBERS: Final[dict[Any, Numbers]] = {mx.float32: "f32", mx.bfloat16: "bf16", mx.float16: "f16"}
_PLAIN: Final = nn.Linear | nn.Embedding

F32 = npt.NDArray[np.float32]


class ModelHead:
    """The head of a model, as a matrix that others may apply.

    `prompts` are those whose states are looked at, `config` what the model's folder says of it.
    Raises `NoHead` where the model's logits are not what its matrix makes of its hidden states.
    """

    def __init__(
        self,
        forward: Forward,
        vocab_size: int,
        prompts: Sequence[Tokens],
        config: Mapping[str, Any],
    ) -> None:
        real = mx.concatenate([forward.states_plainly([prompt])[:, -1] for prompt in prompts])
        self._module: Any = forward.head_module
        weight = self._module.weight
        if not isinstance(self._module, _PLAIN) or weight.dtype not in _NUMBERS:
            kind = type(self._module).__mro__[1].__name__
            raise NoHead(f"its head is a {kind}, and no plain matrix")
        if weight.shape != (vocab_size, real.shape[1]):
            raise NoHead(f"its head is {weight.shape}, and not {(vocab_size, real.shape[1])}")

        def logits(states: F32) -> tuple[F32, F32]:
            placed = mx.array(states).astype(real.dtype)
            return _numbers(forward.head(placed)), _numbers(placed)

        self.form: HeadForm = fitted(
            _numbers(real),
            _numbers(mx.concatenate([forward.plainly([prompt]) for prompt in prompts])),
            self._products,
            logits,
            numbers_of(config),
            _NUMBERS[weight.dtype],
            bias="bias" in self._module,
        )

    def weights(self, rows: slice) -> npt.NDArray[Any]:
        """These rows of the matrix, the bits of bfloat16 as uint16."""
        found = self._module.weight[rows]
        return np.array(found.view(mx.uint16) if found.dtype == mx.bfloat16 else found)

    def bias(self) -> F32:
        """The bias, float32 [vocab]."""
        return _numbers(self._module.bias)

    def _products(self, states: F32) -> F32:
        """The products [states, vocab] of the matrix, with its bias, in float32."""
        weight = self._module.weight
        placed = mx.array(states).astype(weight.dtype).astype(mx.float32)
        found = _numbers(placed @ weight.astype(mx.float32).T)
        return found + self.bias() if "bias" in self._module else found


def head_of(
    forward: Forward,
    vocab_size: int,
    special: Sequence[int | None],
    longest: int,
    config: Mapping[str, Any],
) -> tuple[ModelHead | None, str]:
    """The head of a model, or why there is none that others may apply."""
    prompts = probes(vocab_size, special, longest)
    name = type(forward.model).__module__.rpartition(".")[2]
    return head_or_reason(name, lambda: ModelHead(forward, vocab_size, prompts, config))


def _numbers(array: Any) -> F32:
    found: F32 = np.array(array.astype(mx.float32))
    return found
