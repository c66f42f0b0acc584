"""Format of the embedded model: its configuration, tokenizer, chat template and the small files beside its weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_ID, IM_END_ID = 0, 2
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{{- 'These functions may be called:\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- 'A call is written as:\\n<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if tools and messages[0].role == 'system' else messages) %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
ANSWER_START = f"{IM_START}assistant\n"
# Qwen2's: a leading space or sign stays with its word, every digit stands alone.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": False,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": IM_END_ID,
    "pad_token_id": END_ID,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
GENERATION_CONFIG: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "eos_token_id": [IM_END_ID, END_ID],
    "pad_token_id": END_ID,
}
TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "additional_special_tokens": [IM_START, IM_END],
    "eos_token": IM_END,
    "pad_token": END,
    "model_max_length": CONFIG["max_position_embeddings"],
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def render_turn(role: str, text: str) -> str:
    return f"{IM_START}{role}\n{text}{IM_END}\n"


def render_chat(turns: Iterable[tuple[str, str]]) -> str:
    """Return the text that the chat template makes of (role, text) pairs."""
    return "".join(render_turn(role, text) for role, text in turns)


def render_question(question: str) -> str:
    """Return the prompt of a conversation that begins with a question."""
    return render_turn("user", question) + ANSWER_START


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE with all 256 bytes in its vocabulary, so that it round-trips every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    return tokenizer


def write_json_files(directory: Path) -> None:
    """Write config.json, generation_config.json and tokenizer_config.json."""
    files = {"config": CONFIG, "generation_config": GENERATION_CONFIG, "tokenizer_config": TOKENIZER_CONFIG}
    for name, fields in files.items():
        (directory / f"{name}.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
