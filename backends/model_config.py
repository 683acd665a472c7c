"""What a model says of itself: its longest prompt, its special tokens, its dtype."""

from __future__ import annotations

import copy
import importlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmpool.backends.options import check_positive
from lmpool.errors import SettingsError

logger = logging.getLogger(__name__)

LONGEST_PROMPT_NAMES: Final = ("max_position_embeddings", "n_positions", "max_seq_len")

_BESIDE_SCALING: Final = ("rope_theta", "partial_rotary_factor")
"""What of rotary positions was no part of ``rope_scaling``."""

_SCALED: Final = frozenset({"linear", "llama3", "longrope", "su", "yarn"})
"""Kinds of rotary positions that are others than those of no scaling for prompts of any length."""

_ENDLESS: Final = 1 << 24  # tokenizers without a bound say 10**30


class ModelConfig:
    """config.json and generation_config.json of a model's folder.

    Raises `SettingsError` where config.json is no JSON object.
    """

    def __init__(self, folder: Path) -> None:
        self._generation = _read(folder / "generation_config.json")
        outer = _read(folder / "config.json")
        if not outer:
            raise SettingsError(f"{str(folder / 'config.json')!r} is no JSON object")
        text = outer.get("text_config")
        self._text: dict[str, Any] | None = text if isinstance(text, dict) else None
        self._outer: Mapping[str, Any] = outer
        # Of a model of text and pictures, only the text is served.
        self.config: Mapping[str, Any] = {**outer, **(self._text or {})}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelConfig:
        """What a text's configuration says that is there already."""
        made = cls.__new__(cls)
        made._generation, made._text, made._outer, made.config = {}, None, config, config
        return made

    @property
    def dtype(self) -> str | None:
        """The dtype that the model was saved for."""
        found = self.config.get("dtype", self.config.get("torch_dtype"))
        return found if isinstance(found, str) else None

    def _rope(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``rope_parameters``, which transformers 5 writes: of layers that see all and of those
        that see a window, which place tokens otherwise in some models. Empty where they do not
        count."""
        found = self.config.get("rope_parameters")
        if not isinstance(found, dict) or self.config.get("rope_scaling"):
            return {}, {}
        theta = self.config.get("rope_theta")
        beside = {} if theta is None else {"rope_theta": theta}
        kinds = found.get("full_attention", found), found.get("sliding_attention")
        everywhere, window = (beside | kind if isinstance(kind, dict) else {} for kind in kinds)
        return (everywhere, window) if "rope_theta" in everywhere else ({}, {})

    @property
    def rotary_part(self) -> dict[str, Any]:
        """``partial_rotary_factor`` of its ``rope_parameters``, where config.json has no such one
        beside these."""
        part = self._rope()[0].get("partial_rotary_factor")
        if part is None or self.config.get("partial_rotary_factor") == part:
            return {}
        return {"partial_rotary_factor": part}

    @property
    def activation_of_before(self) -> dict[str, Any]:
        """``hidden_act`` where config.json has ``hidden_activation`` alone, as transformers 5 has
        it for some Gemmas."""
        found = self.config.get("hidden_activation")
        return {} if found is None or "hidden_act" in self.config else {"hidden_act": found}

    @property
    def tied_as_a_whole(self) -> dict[str, Any]:
        """``tie_word_embeddings`` of a model of text and more, where that of its text is another:
        transformers ties a model's head by the whole of it."""
        found = self._outer.get("tie_word_embeddings")
        if self._text is None or found is None or self._text.get("tie_word_embeddings") == found:
            return {}
        return {"tie_word_embeddings": found}

    def within_text(self, changes: dict[str, Any]) -> dict[str, Any]:
        """These `changes` of the text's configuration, as changes of config.json."""
        return changes if self._text is None or not changes else {"text_config": changes}

    def of_before(self) -> dict[str, Any]:
        """``rope_theta``, ``rope_scaling``, ``sliding_window_pattern`` and what else config.json
        had before transformers 5 wrote ``rope_parameters`` and ``layer_types`` instead: to be laid
        over it.

        Who reads the old names only would take a default for them, or what transformers leaves
        beside, and does not heed.
        """
        before = {**self._rope_of_before(), **self._pattern_of_before()}
        absent = object()
        others = {k: v for k, v in before.items() if self.config.get(k, absent) != v}
        return self.within_text({**(self._text or {}), **others} if others else {})

    def _pattern_of_before(self) -> dict[str, Any]:
        """How many layers there are to each that sees all, where it is the last of them, and
        config.json does not say so beside."""
        kinds = self.config.get("layer_types")
        if not isinstance(kinds, list) or "sliding_window_pattern" in self.config:
            return {}
        if {*map(str, kinds)} != {"full_attention", "sliding_attention"}:
            return {}
        each = kinds.index("full_attention") + 1
        whole = [number % each == 0 for number in range(1, len(kinds) + 1)]
        fits = whole == [kind == "full_attention" for kind in kinds]
        return {"sliding_window_pattern": each} if fits else {}

    def _rope_of_before(self) -> dict[str, Any]:
        everywhere, window = self._rope()
        if not everywhere:
            return {}
        theta = everywhere["rope_theta"]
        rope = {"rope_theta": theta, "rotary_emb_base": theta, "rope_scaling": None}
        kind = everywhere.get("rope_type", "default")
        if kind != "default":
            scaling = {k: v for k, v in everywhere.items() if k not in _BESIDE_SCALING}
            rope["rope_scaling"] = {**scaling, "type": kind}
        part = everywhere.get("partial_rotary_factor")
        if part is not None:
            rope |= dict.fromkeys(("partial_rotary_factor", "rotary_pct"), part)
        if "rope_theta" in window:
            rope["rope_local_base_freq"] = window["rope_theta"]
        return rope

    def rotary_dims(self) -> int | None:
        """How many numbers of a head are rotated, where config.json says that it is a part of them,
        the same in all layers."""
        rope = self._rope()[0]
        names = ("partial_rotary_factor", "rotary_pct")
        parts = [rope.get(names[0]), *(self.config.get(name) for name in names)]
        part = next((part for part in parts if part is not None), None)
        size, heads = self.config.get("hidden_size"), self.config.get("num_attention_heads")
        width = self.config.get("head_dim")
        if width is None and type(size) is type(heads) is int and heads:
            width = size // heads
        if self._differs_by_layer() or type(width) is not int or not isinstance(part, float):
            return None
        return int(width * part) if 0 < part < 1 else None

    def rope_scaling(self) -> str | None:
        """How rotary positions are scaled, where they are, in all layers alike."""
        rope, kind = self._scaling()
        return kind if kind in _SCALED and (kind, rope.get("factor")) != ("linear", 1) else None

    def undone_scaling(self) -> dict[str, Any]:
        """``rope_parameters`` without the scaling that is ``dynamic``, which begins beyond the
        model's positions, where no prompt is; empty where it is of another kind, or has an
        ``alpha``, which scales all of them."""
        rope, kind = self._scaling()
        if kind != "dynamic" or rope.get("alpha"):
            return {}
        return {"rope_parameters": {"rope_type": "default", **self._beside_scaling(rope)}}

    def rope_everywhere(self) -> dict[str, Any]:
        """``rope_parameters`` as transformers 5 writes them, where they are the same in all
        layers, whatever config.json calls them; empty where there are none, or no base."""
        rope, kind = self._scaling()
        beside = self._beside_scaling(rope)
        if kind is None or "rope_theta" not in beside:
            return {}
        name = "original_max_position_embeddings"
        original = {name: self.config[name]} if name in self.config else {}
        kind = "longrope" if kind == "su" else kind
        own = {key: value for key, value in rope.items() if key != "type"}
        return {**own, **original, **beside, "rope_type": kind}

    def _beside_scaling(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: rope.get(name, self.config.get(name)) for name in _BESIDE_SCALING}
        return {name: value for name, value in found.items() if value is not None}

    def _scaling(self) -> tuple[dict[str, Any], str | None]:
        """What there is of rotary positions in all layers alike, and their kind."""
        rope = self.config.get("rope_scaling") or self._rope()[0]
        if self._differs_by_layer() or not isinstance(rope, dict):
            return {}, None
        kind = rope.get("rope_type", rope.get("type"))
        return rope, kind if isinstance(kind, str) else None

    def _differs_by_layer(self) -> bool:
        found = self.config.get("rope_parameters")
        return isinstance(found, dict) and isinstance(found.get("full_attention"), dict)

    @property
    def window(self) -> int | None:
        """How many tokens the layers see that do not see all; None where there are none."""
        config = self.config
        found, kinds = config.get("sliding_window"), config.get("layer_types")
        if type(found) is not int or found < 1:
            return None
        if isinstance(kinds, list):
            return found if "sliding_attention" in kinds else None
        # Of Qwen's a window is no more than a number until it is switched on, for the last layers.
        qwen = str(config.get("model_type")).startswith("qwen")
        layers, first = config.get("num_hidden_layers"), config.get("max_window_layers", 0)
        if qwen and type(layers) is type(first) is int and first >= layers:
            return None
        return found if config.get("use_sliding_window", not qwen) else None

    def longest_prompt(self, wanted: int | None) -> int:
        """The longest prompt to serve: the model's own bound, or fewer tokens where `wanted`.

        Raises `SettingsError` for more, and where nobody names a bound.
        """
        said = [self.config.get(name) for name in LONGEST_PROMPT_NAMES]
        return longest_prompt(said if any(said) else self._built_in_bounds(), wanted)

    def _built_in_bounds(self) -> list[object]:
        """What transformers has where config.json says nothing, as Gemma 3's of pictures do."""
        try:
            known = configuration_of(self.config)
        except Exception:  # each family has errors of its own for what it cannot be made of
            return []
        return [getattr(known, name, None) for name in LONGEST_PROMPT_NAMES]

    def within_window(self, longest: int, wanted: int | None, name: str) -> int:
        """The longest prompt, up to this, of a model whose layers all see all, as they may in the
        library that has it as `name`: with a longer one than its window it would be another.

        Raises `SettingsError` where more are `wanted`.
        """
        window = self.window
        if window is None or longest <= window:
            return longest
        if wanted is not None:
            raise SettingsError(
                f"max_prompt_tokens={wanted}: {name} does not heed the model's window of {window} "
                "tokens, and longer prompts would have other rows: write that or less, or serve it "
                "with another engine"
            )
        logger.warning(
            "%s does not heed the model's window of %d tokens: longer prompts are refused",
            name,
            window,
        )
        return window

    @property
    def longrope_bound(self) -> int | None:
        """The original positions of a model whose ``longrope`` has other places for tokens of
        longer texts."""
        rope, kind = self._scaling()
        known = "original_max_position_embeddings"
        original = self.config.get(known, rope.get(known))
        if kind not in ("longrope", "su") or type(original) is not int or original < 2:
            return None
        same = rope.get("short_factor") == rope.get("long_factor")
        return None if same and rope.get("short_mscale") == rope.get("long_mscale") else original

    def within_longrope(self, wanted: int | None, name: str) -> int | None:
        """The longest prompt in the library that has it as `name`, which places all tokens as those
        of long texts where a model's ``longrope`` has other places for them and there is room for
        one: less than the model's original positions. `wanted` of any other model.

        Raises `SettingsError` where more are `wanted`.
        """
        original = self.longrope_bound
        if original is None:
            return wanted
        if wanted is None:
            positions = [self.config.get(each) for each in LONGEST_PROMPT_NAMES]
            longest = longest_prompt(positions, None) if any(positions) else original
            if longest > original:
                logger.warning(
                    "%s places all tokens as those of long prompts (longrope) once it takes one: "
                    "prompts of %d tokens and more are refused",
                    name,
                    original,
                )
            return min(longest, original) - 1
        if wanted >= original:
            raise SettingsError(
                f"max_prompt_tokens={wanted}: {name} would place all tokens as those of prompts of "
                f"more than {original} (longrope), and shorter ones would have other rows: write "
                f"{original - 1} or less, or serve it with another engine"
            )
        return wanted

    def special_tokens(self, vocab_size: int) -> SpecialTokens:
        """The special tokens, each by the first of the files that knows it."""
        return special_tokens((self._generation.get, self.config.get), vocab_size)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The token ids that a model begins, ends and pads its texts with."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def special_tokens(sources: Iterable[Callable[[str], object]], vocab_size: int) -> SpecialTokens:
    """The special tokens by `sources`, each of which looks up a name such as ``eos_token_id``.

    The first of them that knows an id is believed; ids without a place in the row are left out.
    """
    known = tuple(sources)

    def first(name: str) -> tuple[int, ...]:
        for look_up in known:
            value = look_up(name)
            found = value if isinstance(value, list | tuple) else [value]
            ids = [token for token in found if type(token) is int and 0 <= token < vocab_size]
            if ids:
                return tuple(dict.fromkeys(ids))
        return ()

    bos, pad = first("bos_token_id"), first("pad_token_id")
    return SpecialTokens(
        bos=bos[0] if bos else None, eos=first("eos_token_id"), pad=pad[0] if pad else None
    )


def configuration_of(said: Mapping[str, Any]) -> Any:
    """transformers' configuration of what config.json `said`, which stays as it is.

    Raises what each family has for what it cannot be made of, a `KeyError` for an unknown one.
    """
    transformers: Any = importlib.import_module("transformers")
    # It is made of what it is given, and would write into it.
    return transformers.CONFIG_MAPPING[said.get("model_type")].from_dict(copy.deepcopy({**said}))


def longest_prompt(bounds: Iterable[object], wanted: int | None) -> int:
    """The longest prompt to serve: the first bound that is one, or fewer tokens where `wanted`.

    Raises `SettingsError` for more, and where there is no bound.
    """
    check_positive(max_prompt_tokens=wanted)
    known = [int(b) for b in bounds if isinstance(b, int | float) and 0 < b < _ENDLESS]
    if not known and wanted is None:
        raise SettingsError(
            "the model's config.json names no longest prompt: write one as max_prompt_tokens"
        )
    if wanted is not None and known and wanted > known[0]:
        raise SettingsError(
            f"max_prompt_tokens={wanted}: the model takes {known[0]} tokens; write that or less"
        )
    return known[0] if wanted is None else wanted


def _number(found: dict[str, Any]) -> object:
    """What transformers writes of a number that JSON has none for, and else what was `found`."""
    name = found.get("__float__") if len(found) == 1 else None
    return float(name) if isinstance(name, str) else found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes(), object_hook=_number)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SettingsError(f"{str(path)!r} is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}
