"""A model's head, which sees the wanted positions alone, all at once or in blocks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)


def cache_name(model: Any) -> str:
    """What a model calls the cache that it takes and gives back.

    It depends on the release of transformers; models with code of their own keep the older name.
    """
    takes = inspect.signature(model.forward).parameters
    return "cache" if "cache" in takes else "past_key_values"


class Head:
    """A model's forward pass whose head sees the wanted positions alone.

    `logits_to_keep` would do the same, if it took other positions for each prompt in every release
    and every model.

    What follows the trunk (a head, and in some models a scale or a cap) can be computed in blocks:
    the model's own forward pass does it once more for each, with the states in the trunk's place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.cache_name = cache_name(model)
        self._wanted: torch.Tensor | None = None
        self._narrowed = False
        self._block: int | None = None
        self._states: torch.Tensor | None = None
        self._repeats: bool | None = None
        """Whether the trunk can be stood in for, once that was tried."""
        self._gives_states = False
        self._hook: Any = None
        self._attach()

    def logits(self, wanted: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """The logits [wanted, vocab] at places `wanted` of the flattened [rows, positions]."""
        if self._gives_states:
            return self._states_at(wanted, inputs)
        self._wanted, self._narrowed = wanted, False
        try:
            logits: torch.Tensor = self._model(**inputs).logits
        finally:
            self._wanted = None
        return logits[:, 0] if self._narrowed else logits.flatten(0, 1)[wanted.to(logits.device)]

    def blocks(self, wanted: torch.Tensor, rows: int, **inputs: Any) -> Iterator[torch.Tensor]:
        """The same logits in blocks of `rows`, the last of which may be shorter.

        A head that is narrowed computes each when it is asked for. A model that does not bear
        that takes a forward pass for each: right, and slow.
        """
        if self._gives_states:
            yield from self._states_at(wanted, inputs).split(rows)
            return
        if self._repeats is False and self._hook is not None:
            for at in range(0, len(wanted), rows):
                yield self.logits(wanted[at : at + rows], **inputs)
            return
        self._block = rows if len(wanted) > rows else None
        try:
            first = self.logits(wanted, **inputs)
        finally:
            self._block, states, self._states = None, self._states, None
        if states is None:  # all that is wanted is there
            for at in range(0, len(wanted), rows):
                yield first[at : at + rows]
            return
        if self._repeats is None:
            self._repeats = self._try(states[:rows], first)
        yield first
        del first  # one block at a time
        for at in range(rows, len(wanted), rows):
            if self._repeats:
                yield self._after_trunk(states[at : at + rows])
            else:
                yield self.logits(wanted[at : at + rows], **inputs)

    @property
    def gives_states(self) -> bool:
        """Whether it gives states in the place of logits now."""
        return self._gives_states

    @contextmanager
    def giving_states(self) -> Iterator[None]:
        """Give the states that the head is applied to, in the place of logits."""
        self._gives_states = True
        try:
            yield
        finally:
            self._gives_states = False

    def _states_at(self, wanted: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        self._wanted, self._block = wanted, 1  # the head, which is not asked, sees one of them
        try:
            self._model(**inputs)
        finally:
            self._wanted = self._block = None
            states, self._states = self._states, None
        if states is None:
            raise RuntimeError(f"{type(self._model).__name__} calls no head with its states")
        return states

    def after_trunk(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [rows, vocab] of states [rows, hidden] that stand in the trunk's place, and
        the states that the head sees then."""
        seen: list[torch.Tensor] = []
        head = self._model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits = self._after_trunk(states)
        finally:
            hook.remove()
        return logits, seen[0].flatten(0, -2)

    def _try(self, states: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether the model gives these logits of states that stand in the trunk's place."""
        try:
            pairs = zip(self._after_trunk(states), logits, strict=True)  # a whole one takes memory
            right = all(torch.allclose(*pair, 1e-5, 1e-5, equal_nan=True) for pair in pairs)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            logger.info("%s: no head without its trunk (%s)", type(self._model).__name__, error)
            return False
        if not right:
            logger.info("%s gives other logits without its trunk", type(self._model).__name__)
        return right

    def _after_trunk(self, states: torch.Tensor) -> torch.Tensor:
        """The logits [rows, vocab] of states [rows, hidden] that the trunk gave."""
        model, name = self._model, self._model.base_model_prefix
        trunk = model._modules[name]
        ids = torch.zeros((len(states), 1), dtype=torch.int64, device=states.device)
        model._modules[name] = _Trunk(states.unsqueeze(1), trunk)
        try:
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        finally:
            model._modules[name] = trunk
        return logits[:, 0]

    def close(self) -> None:
        """Let the head see all positions again; `logits` picks the wanted ones afterwards."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def follow(self) -> None:
        """Heed that an adapter may have put another module in the head's place."""
        self._repeats = None
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
        chosen = states.flatten(0, 1)[at]
        if self._block is not None:
            self._states, chosen = chosen, chosen[: self._block]
        return (chosen.unsqueeze(1), *inputs[1:])


class _Output(tuple[torch.Tensor, ...]):
    """What a trunk gives, as models read it: by number or name, of which most may be absent."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, _: str) -> None:
        return None


class _Trunk(torch.nn.Module):
    """Stands in a trunk's place, and gives the states that the trunk gave before."""

    def __init__(self, states: torch.Tensor, trunk: Any) -> None:
        super().__init__()
        self._given = states
        # Not as a part of this one: it would be walked through.
        object.__setattr__(self, "_trunk", trunk)

    def forward(self, *_: object, **__: object) -> _Output:
        return _Output((self._given,))

    @property
    def decoder(self) -> _Trunk:
        """Of models that call a part of their trunk."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_trunk"), name)
