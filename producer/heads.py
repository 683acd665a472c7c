"""A model's head on the client's side: rows of hidden states, without the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lmpool.checks import quoted, said
from lmpool.errors import LmpoolError, PromptError, SettingsError
from lmpool.head_form import HeadForm
from lmpool.producer.frameworks import Framework, RowT_co
from lmpool.rows import bf16_to_f32
from lmpool.token_ids import Tensor

if TYPE_CHECKING:
    import torch

F32 = npt.NDArray[np.float32]
_State: TypeAlias = npt.NDArray[np.floating[Any]] | Tensor
States: TypeAlias = _State | Sequence[_State]
"""Hidden states: [hidden_size] or [n, hidden_size], or a list of the former."""

_KINDS: Final = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}


@dataclass(frozen=True, slots=True, eq=False)
class HeadNumbers:
    """A head as it was read: the bytes of its matrix, of `form.numbers`, and its bias."""

    form: HeadForm
    vocab_size: int
    matrix: npt.NDArray[np.uint8]
    bias: F32 | None

    def weight(self) -> npt.NDArray[Any]:
        """The matrix [vocab_size, hidden_size]; bfloat16 as its bits, uint16."""
        return self.matrix.view(_KINDS[self.form.numbers]).reshape(self.vocab_size, -1)


class Head(Generic[RowT_co]):
    """What `lm.head()` gives: makes rows of hidden states as the model does.

    It belongs to the model that was served when it was read, without an adapter, and needs the
    client no more. Several threads may use it.
    """

    def __init__(
        self, numbers: HeadNumbers, framework: Framework[RowT_co], device: object = None
    ) -> None:
        self.form = numbers.form
        """How it makes logits: its size, scale and cap."""
        self.vocab_size = numbers.vocab_size
        self._framework = framework
        on_torch = device is not None or framework.name == "torch"
        self._computing: _Computing = _OnTorch(numbers, device) if on_torch else _OnNumpy(numbers)

    def logprobs(self, hidden: States) -> RowT_co:
        """The rows of hidden states, float32 [vocab_size] or [n, vocab_size], natural log,
        normalized: as rows of this client are, on the head's own device.

        `hidden` [hidden_size] or [n, hidden_size] is an array, a tensor, or a list of what
        `last_hidden_state` gave. Raises `PromptError` for what has another shape or no numbers.
        """
        try:
            states = self._computing.states(hidden)
            shape = tuple(states.shape)
        except Exception as error:  # of the value's own, or of torch
            raise PromptError(
                f"hidden={quoted(hidden)}: write an array of floating-point numbers ({said(error)})"
            ) from None
        if len(shape) not in (1, 2) or shape[-1] != self.form.hidden_size:
            raise PromptError(
                f"hidden of shape {shape}: [{self.form.hidden_size}] is needed, or [n, "
                f"{self.form.hidden_size}]"
            )
        try:
            return self._framework.own(self._computing.logprobs(states))
        except Exception as error:  # no room on its device
            raise LmpoolError(f"the head could not be applied: {said(error)}") from error

    def __repr__(self) -> str:
        return f"Head({self.form}, vocab_size={self.vocab_size}, {self._computing})"


class _OnNumpy:
    """In float32, by NumPy."""

    def __init__(self, numbers: HeadNumbers) -> None:
        weight = numbers.weight()
        bits = numbers.form.numbers == "bf16"
        self._weight: F32 = bf16_to_f32(weight) if bits else weight.astype(np.float32)
        self._bias, self._form = numbers.bias, numbers.form

    def states(self, given: Any) -> F32:
        if isinstance(given, (list, tuple)):
            given = [_array(each) for each in given]
        found = np.asarray(_array(given))
        if found.dtype.kind not in "fiu":
            raise TypeError(f"of dtype {found.dtype}")
        return found.astype(np.float32)

    def logprobs(self, states: F32) -> F32:
        logits = states @ self._weight.T
        if self._bias is not None:
            logits += self._bias
        logits *= np.float32(self._form.scale)
        if (cap := self._form.cap) is not None:
            logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
        logits -= logits.max(axis=-1, keepdims=True)
        with np.errstate(under="ignore"):
            logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return cast(F32, logits)

    def __repr__(self) -> str:
        return "numpy"


class _OnTorch:
    """By torch: on a CPU in float32, elsewhere in the dtype that the model's head has."""

    def __init__(self, numbers: HeadNumbers, device: object) -> None:
        try:
            import torch

            self._device = torch.device("cpu" if device is None else cast(str, device))
            weight = torch.from_numpy(_signed(numbers.weight()))
            if numbers.form.numbers == "bf16":
                weight = weight.view(torch.bfloat16)
            on_cpu = self._device.type == "cpu"
            self._weight = weight.to(self._device, torch.float32 if on_cpu else weight.dtype)
            bias = None if numbers.bias is None else torch.from_numpy(numbers.bias.copy())
            self._bias = None if bias is None else bias.to(self._device)
        except ImportError:
            raise SettingsError(
                f"device={quoted(device)}: torch is not installed; leave device out"
            ) from None
        except Exception as error:
            raise SettingsError(
                f"device={quoted(device)}: write a device of torch that has room for the head, "
                f"such as 'cpu' or 'cuda' ({said(error)})"
            ) from error
        self._form = numbers.form

    def states(self, given: Any) -> torch.Tensor:
        import torch

        if isinstance(given, (list, tuple)):
            given = np.array([_array(each) for each in given])
        found = given if isinstance(given, torch.Tensor) else torch.tensor(np.asarray(given))
        if found.is_complex() or found.dtype == torch.bool:
            raise TypeError(f"of dtype {found.dtype}")
        return found.to(self._device, self._weight.dtype)

    def logprobs(self, states: torch.Tensor) -> torch.Tensor:
        import torch

        logits = (states @ self._weight.T).float()
        if self._bias is not None:
            logits = logits + self._bias
        logits = logits * self._form.scale
        if (cap := self._form.cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return torch.log_softmax(logits, dim=-1)

    def __repr__(self) -> str:
        return f"torch on {self._device}"


class _Computing(Protocol):
    """What a head is applied by; `states` are its own kind of array."""

    def states(self, given: Any) -> Any: ...
    def logprobs(self, states: Any) -> Any: ...


def _array(given: Any) -> Any:
    """A tensor of torch, on any device and of any dtype, as an array; anything else as it is."""
    return given.detach().float().cpu().numpy() if hasattr(given, "detach") else given


def _signed(weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What torch takes: it knows few unsigned integers."""
    return weight.view(np.int16) if weight.dtype == np.uint16 else weight
