"""Checkpoints for the benchmarks: random weights in a few shapes, in the real format.

python benchmarks/shapes.py DIRECTORY [NAME ...]
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

SHAPES = {
    "dense-0.6b": {
        "family": "Qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "moe-1b": {
        "family": "Qwen3Moe",
        "num_hidden_layers": 12,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_000,
    },
    "dense-tiny": {
        "family": "Qwen3",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8_000,
    },
    "moe-tiny": {
        "family": "Qwen3Moe",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8_000,
    },
    "mla-0.6b": {  # the attention of DeepSeek-V2-Lite
        "family": "DeepseekV2",
        "num_hidden_layers": 6,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "moe_intermediate_size": 704,
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 32_000,
    },
}


def make(name: str, directory: Path) -> Path:
    """Return the directory of a checkpoint, which is made now unless it exists."""
    path = directory / name
    if (path / "tokenizer.json").exists():
        return path
    import torch
    import transformers

    shape = dict(SHAPES[name])
    family = shape.pop("family")
    config = getattr(transformers, f"{family}Config")(
        **shape,
        tie_word_embeddings=True,
        max_position_embeddings=16_384,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(path)
    _make_tokenizer(path)
    return path


def _make_tokenizer(path: Path) -> None:
    """Train a byte-level BPE on the standard library; it is smaller than the model's vocabulary, which is harmless."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(str(file) for file in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer.train(sources, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(path)


if __name__ == "__main__":
    for wanted in sys.argv[2:] or SHAPES:
        print(make(wanted, Path(sys.argv[1])))
