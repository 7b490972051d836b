"""Tiny models with random weights, large enough that wrong KV bytes change what comes out.

`python models.py DIR` saves all of them below DIR, the same bytes every time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
    # `load_format="dummy"` gives weights so small that any KV cache gives the same tokens.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


def full() -> Any:
    """One group: full attention."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, num_hidden_layers=2, num_key_value_heads=2))


def window() -> Any:
    """Two groups: full attention, and a window of two blocks."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_SIZES,
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return Gemma3ForCausalLM(config)


def recurrent() -> Any:
    """Two groups: full attention, and the recurrent state of a gated delta net (Mamba spec)."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_SIZES,
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=64,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return Qwen3NextForCausalLM(config)


def latent() -> Any:
    """One group: multi-head latent attention, of the one size that vLLM's CPU kernel has.

    One layer, so that the KV cache of a token is of that token alone.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **_SIZES,
        num_hidden_layers=1,
        num_key_value_heads=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=1,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
    )
    return DeepseekV3ForCausalLM(config)


def tokenizer() -> Any:
    """A token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


MODELS = {"full": full, "window": window, "recurrent": recurrent, "latent": latent}


def main() -> None:
    import torch

    for name, make in MODELS.items():
        torch.manual_seed(0)
        directory = Path(sys.argv[1]) / name
        make().to(torch.bfloat16).save_pretrained(directory)
        tokenizer().save_pretrained(directory)


if __name__ == "__main__":
    main()
