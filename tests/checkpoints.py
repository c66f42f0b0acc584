"""Small random checkpoints of every family, as transformers writes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
}

COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # logits differ clearly, so that the best token is not a matter of rounding
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
"""Fields of the DeepSeek families."""
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 64},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT | {"q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": LATENT | {"q_lora_rank": 24, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 48,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "truncate": False,
        },
    },
}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXTS = (
    "The quick brown fox jumps over the lazy dog. Hello world, hello there, how are you today?",
    "def main():\n    for index in range(10):\n        print(index)\n    return None\n",
    "Grüße aus Köln: süße Äpfel und größere Öfen. Café, naïve, déjà vu. 日本語のテキスト、東京。 👋🏽 🎉",
)


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    dtype: str = "float32",
    tokenizer: bool = True,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint of random weights into `directory`, and return the directory. Equal arguments give equal
    checkpoints.

    `config_overrides` are fields of transformers' configuration. Token ids 0 to 2 are special, and 2 ends a turn; with
    `tokenizer=False` no token ends a turn.
    """
    end = {"eos_token_id": SPECIAL_TOKENS.index("<|im_end|>")} if tokenizer else {}
    config_class, model_class = CLASSES[family]
    config = config_class(**{**COMMON, **SPECIAL[family], **end, **config_overrides})
    with _seeded(seed):
        model = model_class(config).eval()
        _vary(model)
    with _quiet():
        model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        write_tokenizer(directory, vocab_size=config.vocab_size)
    return directory


def make_pooling_checkpoint(
    directory: Path,
    family: str,
    *,
    num_labels: int = 0,
    tokenizer: bool = True,
    modules: Mapping[str, str] | None = None,
    is_prefixed: bool = True,
    **config_overrides: Any,
) -> Path:
    """Write a checkpoint without a head, or with one of `num_labels` labels, and return the directory.

    `modules`: the mode of pooling and other modules as sentence-transformers writes them, such as `{"Pooling": "mean"}`
    and `{"Normalize": ""}`; None: no modules.json. `is_prefixed`: whether the names of tensors have the prefix that
    those of models with a head have.
    """
    config_class, _ = CLASSES[family]
    labels = {"num_labels": num_labels} if num_labels else {}
    config = config_class(**{**COMMON, **SPECIAL[family], "pad_token_id": 0, **labels, **config_overrides})
    auto_class = transformers.AutoModelForSequenceClassification if num_labels else transformers.AutoModel
    with _seeded(0):
        model = auto_class.from_config(config).float().eval()
        _vary(model)
    with _quiet():
        model.save_pretrained(directory)
    if is_prefixed and not num_labels:
        path = directory / "model.safetensors"
        save_file({f"model.{name}": weight for name, weight in load_file(path).items()}, path, {"format": "pt"})
    if tokenizer:
        write_tokenizer(directory, vocab_size=config.vocab_size)
    if modules is not None:
        _write_modules(directory, modules)
    return directory


def _write_modules(directory: Path, modules: Mapping[str, str]) -> None:
    entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, mode) in enumerate(modules.items(), 1):
        path = f"{index}_{kind}"
        entries.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
        if kind == "Pooling":
            (directory / path).mkdir()
            names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
            fields = {f"pooling_mode_{name}": name.startswith(mode) for name in names}
            (directory / path / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **fields}))
    (directory / "modules.json").write_text(json.dumps(entries))


def edit_config(directory: Path, *remove: str, **fields: Any) -> None:
    """Change a checkpoint's config.json, also in ways that transformers would not write."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name in remove:
        del config[name]
    path.write_text(json.dumps(config | fields))


def write_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer with a chat template, trained on a few sentences."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _vary(model: torch.nn.Module) -> None:
    """Add noise to norms and biases: transformers' 1 and 0 would hide a norm or a bias that is left out."""
    router_biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        biases = [weight for name, weight in model.named_parameters() if weight.dim() == 1 or name.endswith("_bias")]
        for parameter in [*biases, *router_biases]:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the progress bars and messages of transformers."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
