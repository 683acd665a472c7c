"""An MLX model's forward pass: from kept prefixes and new tokens to the logits after them."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from lmpool.backends.engine import Tokens
from lmpool.backends.mlx.arguments import (
    EPSILONS,
    family_of,
    known,
    noted,
    read_meanwhile,
    told,
    unheeded,
)
from lmpool.backends.mlx.families import taken
from lmpool.backends.mlx.prefixes import Slots
from lmpool.backends.mlx.rotary import settle_rotary
from lmpool.backends.model_config import ModelConfig
from lmpool.backends.options import DTYPES, check_dtype
from lmpool.cache_memory import MOST_POSITIONS
from lmpool.checks import why_failed
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

# mlx comes without types.
mx: Any = importlib.import_module("mlx.core")
nn: Any = importlib.import_module("mlx.nn")
mlx_cache: Any = importlib.import_module("mlx_lm.models.cache")
mlx_lm: Any = importlib.import_module("mlx_lm.utils")
tree_flatten: Any = importlib.import_module("mlx.utils").tree_flatten

_ROUTER_BIASES: Final = ("e_score_correction_bias", "expert_bias", "router_bias")
"""How the names end of what is added to a router's scores: in transformers, and in mlx-lm also."""


def on_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def load_model(folder: Path, config: ModelConfig, *, dtype: str, trust_remote_code: bool) -> Any:
    """The model in `folder`, evaluated, in `dtype`: ``auto`` is float32 on a CPU, else its own.

    Raises `SettingsError` for what cannot be loaded.
    """
    check_dtype(dtype)
    if dtype == "auto":
        dtype = (config.dtype or "") if on_gpu() else "float32"
    try:
        with read_meanwhile() as read:
            model, _ = mlx_lm.load_model(
                folder,
                lazy=True,
                model_config=noted(config, told(config), read),
                get_model_classes=_classes,
                trust_remote_code=trust_remote_code,
            )
            reason = _cannot_compute(model)
        _settle_norms(model, config, read)
        _check_read(model, config, read)
        if reason:
            raise ValueError(reason)
        _check_rotary(model, config)
        if dtype in DTYPES:
            model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        kind = config.config.get("model_type")
        raise SettingsError(
            f"the model in {str(folder)!r}, of model_type {kind!r}, cannot be loaded: {_why(error)}"
        ) from error
    _check_routers(model, folder)
    model.eval()
    return model


_LACKING: Final = re.compile(r"missing \d+ required \w+ arguments?: (.*)")
_WEIGHTS: Final = re.compile(r"(Missing|Received) (\d+) parameters")
_ELSE: Final = "or serve it with another engine"
_LONGEST_REASON: Final = 300


def _why(error: BaseException) -> str:
    """Why mlx-lm does not load a model, in a line, and what to do."""
    said = " ".join(str(error).split())
    said = said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}..."
    if isinstance(error, SystemExit):  # OLMo's module does so without a package that it needs
        return "mlx-lm would end the process for it, and printed why"
    if isinstance(error, TypeError) and (lacking := _LACKING.search(said)):
        return f"mlx-lm asks for {lacking[1]}, which config.json lacks: write that there, {_ELSE}"
    if isinstance(error, ValueError) and _WEIGHTS.match(said):
        return (
            "its weights are not named as mlx-lm has this family's: take them as they are on the "
            f"hub or as mlx_lm.convert writes them, {_ELSE} ({said})"
        )
    what = why_failed(error, said)
    if isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError | ValueError):
        what += f" (mlx-lm makes no model of this config.json: mend it, {_ELSE})"
    return what


def _classes(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes of a model, which take the weights as transformers 5 names them, too."""
    model, arguments = mlx_lm._get_classes(config)

    def sanitize(own: Any, weights: dict[str, Any]) -> dict[str, Any]:
        weights = taken(family_of(model), weights, config)
        return model.sanitize(own, weights) if hasattr(model, "sanitize") else weights

    body = {"sanitize": sanitize, "__module__": model.__module__}
    return type(model.__name__, (model,), body), arguments


def _cannot_compute(model: Any) -> str:
    """Why the model cannot compute a token; nothing is computed here."""
    try:
        model(mx.zeros((1, 1), mx.int32), cache=mlx_cache.make_prompt_cache(model))
    except Exception as error:
        return f"it computes no token ({type(error).__name__}: {error})"
    return ""


def _check_read(model: Any, config: ModelConfig, read: set[str]) -> None:
    """Refuse a model that is computed by more of config.json than mlx-lm has `read`."""
    module = type(model).__module__
    found = unheeded(family_of(type(model)), config, read)
    if found is not None:
        name, value = found
        raise SettingsError(
            f"{module} does not heed {name}={value!r} of config.json: rows would be others; serve "
            "it with another engine"
        )


def _check_routers(model: Any, folder: Path) -> None:
    """Refuse a model of whose routers mlx-lm leaves out what they choose experts by."""
    names = [name for name, _ in tree_flatten(model.parameters())]
    if any(name.endswith(_ROUTER_BIASES) for name in names):
        return
    for file in sorted(folder.glob("model*.safetensors")):
        for name, weights in mx.load(str(file)).items():  # nothing but names is read
            if name.endswith(_ROUTER_BIASES[0]) and bool(mx.any(weights != 0)):
                raise SettingsError(
                    f"{type(model).__module__} leaves out {name!r}, by which the model chooses "
                    "experts: rows would be others; serve it with another engine"
                )


_LATENT: Final = ("q_a_layernorm", "kv_a_layernorm", "indexer.k_norm")
_LATENT_EPSILON: Final = 1e-6
"""What transformers has built in for the norms of latent states, whatever config.json says."""

_PLAIN_EPSILON: Final = frozenset({"mamba2"})
"""Families of mlx-lm that read the epsilon for some of their norms, and not for others."""


def _settle_norms(model: Any, config: ModelConfig, read: set[str]) -> None:
    """Have norms add to a variance what transformers has them add, which counts as `read` then."""
    full = known(config)
    if full is None:
        return
    norms = [(n, m) for n, m in model.named_modules() if type(m) in (nn.RMSNorm, nn.LayerNorm)]
    for name, norm in norms:
        if name.endswith(_LATENT):
            norm.eps = _LATENT_EPSILON
    said = EPSILONS & {*full.__dataclass_fields__}
    some = family_of(type(model)) in _PLAIN_EPSILON
    if len(said) == 1 and norms and (some or not EPSILONS & read):
        for _, norm in norms:
            norm.eps = getattr(full, *said)
        read |= said


def _check_rotary(model: Any, config: ModelConfig) -> None:
    """Have tokens placed as config.json says, or refuse the model."""
    reason = settle_rotary(model, config)
    if reason:
        raise SettingsError(
            f"{type(model).__module__} {reason}: rows would be others; serve it with another engine"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """The kept positions before each prompt's new tokens.

    `slots` is int32 [prompts, longest prefix], padded on the right; `lengths` the prefixes' own.
    """

    slots: Any
    lengths: Sequence[int]

    @classmethod
    def of(cls, kept: Sequence[Slots]) -> Prefixes | None:
        """Those in the slots that are kept of each prompt; None where nothing is."""
        lengths = [slots.size for slots in kept]
        longest = max(lengths)
        if not longest:
            return None
        padded = np.zeros((len(kept), longest), np.int32)
        for row, slots in zip(padded, kept, strict=True):
            row[: slots.size] = slots
        return cls(mx.array(padded), lengths)


class KeyValueStore:
    """The keys and values of kept positions, one array [slots, heads, width] of each a layer.

    `position_bytes` is what a position takes in all layers. The arrays grow up to `capacity` slots.
    """

    def __init__(self, layers: Sequence[_LayerCache], cache_bytes: int) -> None:
        shapes = [(c.keys.shape, c.values.shape, c.keys.dtype, c.values.dtype) for c in layers]
        self._shapes = [((k[1], k[3], kind), (v[1], v[3], other)) for k, v, kind, other in shapes]
        self.position_bytes = sum(
            heads * width * dtype.size for pair in self._shapes for heads, width, dtype in pair
        )
        self.capacity = min(cache_bytes // self.position_bytes, MOST_POSITIONS)
        self.clear()

    def clear(self) -> None:
        """Free the arrays."""
        self._size = 0
        self._arrays: list[tuple[Any, Any]] = []

    def take(self, layer: int, slots: Any) -> tuple[Any, Any]:
        """A layer's keys and values in `slots` [prompts, positions], each [prompts, heads, ...]."""
        keys, values = self._arrays[layer]
        return (
            mx.take(keys, slots, axis=0).transpose(0, 2, 1, 3),
            mx.take(values, slots, axis=0).transpose(0, 2, 1, 3),
        )

    def put(self, slots: Slots, layers: Sequence[_LayerCache], rows: Any, columns: Any) -> None:
        """Keep new tokens: that of prompt `rows[i]`, position `columns[i]`, in `slots[i]`."""
        self._grow(int(slots.max()) + 1)
        where = mx.array(slots.astype(np.int32))
        for arrays, layer in zip(self._arrays, layers, strict=True):
            for array, new in zip(arrays, (layer.keys, layer.values), strict=True):
                array[where] = new[rows, :, columns]
        mx.eval(self._arrays)

    def _grow(self, needed: int) -> None:
        if needed <= self._size:
            return
        size = min(self.capacity, max(needed, 2 * self._size, 1024))
        added = size - self._size
        grown = []
        for number, shapes in enumerate(self._shapes):
            pair = [mx.zeros((added, heads, width), dtype) for heads, width, dtype in shapes]
            if self._size:
                old = self._arrays[number]
                pair = [mx.concatenate([a, b]) for a, b in zip(old, pair, strict=True)]
            grown.append((pair[0], pair[1]))
        mx.eval(grown)
        self._arrays, self._size = grown, size


class _LayerCache:
    """What a layer of mlx-lm takes for its cache: kept positions first, then the new tokens.

    It has the part of mlx-lm's `KVCache` that models use: `offset`, `make_mask` and
    `update_and_fetch`.
    """

    def __init__(self, layer: int, batch: _Batch) -> None:
        self._layer = layer
        self._batch = batch
        self.keys: Any = None
        self.values: Any = None

    @property
    def offset(self) -> Any:
        """Where the new tokens begin: one number, or one for each prompt."""
        return self._batch.offset

    def make_mask(self, length: int, return_array: bool = False, window_size: Any = None) -> Any:
        if window_size is not None:
            raise NotImplementedError("a sliding window")
        return self._batch.mask(length, return_array)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Take the new tokens' keys and values [prompts, heads, positions, width]; all of them."""
        self.keys, self.values = keys, values
        prefixes, store = self._batch.prefixes, self._batch.store
        if prefixes is None or store is None:
            return keys, values
        kept_keys, kept_values = store.take(self._layer, prefixes.slots)
        return (
            mx.concatenate([kept_keys, keys], axis=2),
            mx.concatenate([kept_values, values], axis=2),
        )


class _Batch:
    """What the layers of one forward pass share."""

    def __init__(self, prefixes: Prefixes | None, store: KeyValueStore | None) -> None:
        self.prefixes = prefixes
        self.store = store
        lengths = [0] if prefixes is None else prefixes.lengths
        self._kept = 0 if prefixes is None else prefixes.slots.shape[1]
        self._even = min(lengths) == self._kept
        self.offset: Any = self._kept if self._even else mx.array(lengths)
        self._lengths = lengths

    def mask(self, length: int, return_array: bool) -> Any:
        if self._even and not return_array:
            return None if length == 1 else "causal"
        lengths = mx.array(self._lengths)[:, None, None, None]
        before = mx.arange(self._kept)[None, None, None] < lengths
        before = mx.broadcast_to(before, (len(self._lengths), 1, length, self._kept))
        positions = mx.arange(length)
        causal = positions[:, None] >= positions[None]
        causal = mx.broadcast_to(causal, (len(self._lengths), 1, length, length))
        return mx.concatenate([before, causal], axis=3)


class Forward:
    """Runs a model of mlx-lm for the logits after each of several prompts.

    The new tokens are padded on the right, where a causal model never looks from a prompt's own
    tokens. The head sees one position of each prompt, or what a text's tokens are scored by.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.computed_tokens = 0
        """Of prompts, in all passes, those of which only the head was computed among them."""
        self._head_input: Callable[[Any], Any] | None = None
        """What the head is applied to instead of the states [prompts, positions, hidden]."""
        self.head_module: Any = None
        """The layer, or the tied embedding, that was last applied as a head."""
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == "lm_head":
                self._narrow(module, "__call__")
            elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                self._narrow(module, "as_linear")

    def __call__(
        self,
        prompts: Sequence[Tokens],
        prefixes: Prefixes | None,
        store: KeyValueStore | None,
    ) -> tuple[Any, list[_LayerCache]]:
        """The logits after each prompt [prompts, vocab], and the layers' new keys and values."""
        batch = _Batch(prefixes, store)
        layers = [_LayerCache(number, batch) for number in range(len(self.model.layers))]
        return self._logits(prompts, layers), layers

    def plainly(self, prompts: Sequence[Tokens]) -> Any:
        """The same logits for prompts of one length, by the model's own kind of cache."""
        return self._logits(prompts, mlx_cache.make_prompt_cache(self.model))

    def has_plain_cache(self) -> bool:
        """Whether the model asks for nothing more than keys and values of every position."""
        caches = mlx_cache.make_prompt_cache(self.model)
        return all(type(cache) is mlx_cache.KVCache for cache in caches)

    def states(
        self,
        prompts: Sequence[Tokens],
        prefixes: Prefixes | None,
        store: KeyValueStore | None,
    ) -> tuple[Any, list[_LayerCache]]:
        """What the head would be applied to at each new token [prompts, positions, hidden].

        Also the layers' new keys and values. Raises `ValueError` where the head was not found.
        """
        batch = _Batch(prefixes, store)
        layers = [_LayerCache(number, batch) for number in range(len(self.model.layers))]
        return self._states(prompts, layers), layers

    def states_plainly(self, prompts: Sequence[Tokens]) -> Any:
        """The same states for prompts of one length, by the model's own kind of cache."""
        return self._states(prompts, mlx_cache.make_prompt_cache(self.model))

    def head(self, states: Any) -> Any:
        """The logits [rows, vocab] of states [rows, hidden]."""
        # All that the model does after its head belongs to it. What stands before it is never
        # evaluated, as nothing comes of it.
        cache = mlx_cache.make_prompt_cache(self.model)
        return self._run([np.zeros(1, np.uint32)], cache, lambda _: states[None])[0]

    def _states(self, prompts: Sequence[Tokens], cache: Sequence[Any]) -> Any:
        seen: list[Any] = []

        def see(states: Any) -> Any:
            seen.append(states)
            return states[:, -1:]

        self._run(prompts, cache, see)
        if len(seen) != 1 or seen[0].ndim != 3:
            raise ValueError(f"the model applies {len(seen)} heads")
        return seen[0]

    def _logits(self, prompts: Sequence[Tokens], cache: Sequence[Any]) -> Any:
        last = mx.array([prompt.size - 1 for prompt in prompts])

        def narrow(states: Any) -> Any:
            return _at(states, last) if states.ndim == 3 and states.shape[1] > 1 else states

        logits = self._run(prompts, cache, narrow)
        if logits.shape[1] != 1:
            logits = _at(logits, last)
        return logits[:, 0]

    def _run(
        self, prompts: Sequence[Tokens], cache: Sequence[Any], head_input: Callable[[Any], Any]
    ) -> Any:
        self.computed_tokens += sum(prompt.size for prompt in prompts)
        padded = np.zeros((len(prompts), max(p.size for p in prompts)), dtype=np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: prompt.size] = prompt
            row[prompt.size :] = prompt[-1]  # another token might overflow where these do not
        self._head_input = head_input
        try:
            return self.model(mx.array(padded), cache=cache)
        finally:
            self._head_input = None

    def _narrow(self, module: Any, method: str) -> None:
        """Have the method see what it is to be applied to alone.

        An own class for this one module keeps its parameters and its kind as they are.
        """
        kind = type(module)
        compute = getattr(kind, method)

        def narrow(own: Any, states: Any) -> Any:
            if self._head_input is not None:
                self.head_module = own
                states = self._head_input(states)
            return compute(own, states)

        module.__class__ = type(kind.__name__, (kind,), {method: narrow})


def _at(states: Any, positions: Any) -> Any:
    """Of [prompts, positions, width], the given position of each prompt: [prompts, 1, width]."""
    return mx.take_along_axis(states, positions[:, None, None], axis=1)
