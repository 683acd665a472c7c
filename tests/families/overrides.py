"""What a small configuration of a family needs besides what the names of its fields tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_DRAFT: Final[Mapping[str, Any]] = {
    # Its layers use the keys of another model's.
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}

OVERRIDES: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
        "global_config": {"max_position_embeddings": 512},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    # Layers before, in and after its loop.
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "head_dim": 24,
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": 64,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_DRAFT}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **_DRAFT}},
    "got_ocr2": {"text_config": {"model_type": "qwen2"}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"}},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": lambda limits: 2 * limits.selected,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": 500,
        "split_ngram_parts": 4,
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 20],
        "axial_pos_embds_dim": [32, 32],
        "max_position_embeddings": 320,
    },
    # Its attention layers share their weights: there must be two.
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
}
