"""Every model that tests build: small ones of random weights, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers

VOCAB: Final = 211
LONGEST: Final = 96
WINDOW: Final = 12
"""How far layers see that do not see all."""


def _llama_like(hidden: int, **changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": hidden * 3 // 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": LONGEST,
    }
    return {**sizes, **changes}


def _gpt2(hidden: int, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "n_embd": hidden, "n_layer": 2, "n_head": 2}
    return transformers.GPT2Config(**{**sizes, "n_positions": LONGEST, **changes})


def _mamba(hidden: int, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
    return transformers.MambaConfig(**{**sizes, **changes})


def _gpt_neo(hidden: int, **changes: Any) -> Any:
    return transformers.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=LONGEST,
        **changes,
    )


def _bloom(hidden: int, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "n_layer": 2, "n_head": 2}
    return transformers.BloomConfig(**{**sizes, **changes})


def _named(config: str, **own: Any) -> Callable[..., Any]:
    """A configuration in a Llama's terms; a callable among `own` is given the hidden size."""

    def make(hidden: int, **changes: Any) -> Any:
        given = {name: v(hidden) if callable(v) else v for name, v in own.items()}
        sizes = _llama_like(hidden, **{**given, **changes})
        return getattr(transformers, f"{config}Config")(**sizes)

    return make


def _half(hidden: int) -> int:
    return hidden // 2


_MAKE: Final[dict[str, Callable[..., Any]]] = {
    "llama": _named("Llama"),
    "qwen2": _named("Qwen2"),
    "qwen3": _named("Qwen3", head_dim=_half),
    "mistral": _named("Mistral", sliding_window=None),
    "gpt2": _gpt2,
    "gpt_neox": _named("GPTNeoX", num_key_value_heads=2),
    "phi": _named("Phi", num_key_value_heads=2),
    "windowed mistral": _named("Mistral", sliding_window=WINDOW),
    # All layers but the first see no further than the window.
    "windowed qwen2": _named(
        "Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "windowed qwen3": _named(
        "Qwen3",
        head_dim=_half,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    # Every second layer sees a window; soft caps on attention and on logits, so that the head is
    # not the last thing computed.
    "gemma2": _named(
        "Gemma2",
        head_dim=_half,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    # Five layers of six see a window, with rotary positions of their own.
    "gemma3": _named("Gemma3Text", num_hidden_layers=7, head_dim=_half, sliding_window=WINDOW),
    "phi3": _named("Phi3", sliding_window=WINDOW, pad_token_id=0),
    "starcoder2": _named("Starcoder2", sliding_window=WINDOW),
    # Three layers of four see the chunk that they are in.
    "llama4": _named(
        "Llama4Text",
        num_hidden_layers=4,
        head_dim=_half,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
    ),
    # Rotary positions that depend on the longest prompt of a forward pass.
    "dynamic_rope": _named(
        "Llama",
        max_position_embeddings=WINDOW,
        rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10_000.0},
    ),
    # A recurrent state and no position ids: padding on the left would be part of every prompt.
    "mamba": _mamba,
    # A causal mask of its own, by the places of keys in the cache.
    "gpt_neo": _gpt_neo,
    # Positions by the attention mask.
    "bloom": _bloom,
    # Not causal, so that its rows depend on padding.
    "bert": _named("Bert"),
}

SERVED: Final = ("gpt2", "gpt_neox", "llama", "mistral", "phi", "qwen2", "qwen3")
"""Models whose layers see all that is before a position."""
WINDOWED: Final = (
    "gemma2", "gemma3", "llama4", "phi3", "starcoder2",
    "windowed mistral", "windowed qwen2", "windowed qwen3",
)  # fmt: skip
"""Models with layers that see less."""
UNFIT: Final = ("bloom", "gpt_neo", "mamba")
"""Models whose states cannot be kept and shared by position."""


def configuration(name: str, *, hidden: int = 32, **changes: Any) -> Any:
    """The configuration called `name`, of a hidden size, with `changes`."""
    return _MAKE[name](hidden, **changes)


def save_model(
    folder: Path, name: str, *, hidden: int = 32, scale: float = 3.0, **changes: Any
) -> str:
    """Write a model of random weights, times `scale` so that rows differ by nats; the folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        configuration(name, hidden=hidden, **changes)
    )
    if name != "mamba":  # whose state would overflow
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
    model.save_pretrained(folder)
    return str(folder)


def without_prefix(folder: str, prefix: str) -> str:
    """The same folder, its weights named without `prefix`."""
    from safetensors.torch import load_file, save_file

    file = Path(folder) / "model.safetensors"
    plain = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    save_file(plain, file, metadata={"format": "pt"})
    return folder
