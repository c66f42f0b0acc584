"""Trains the demo model that ships in `eagleray/demo_model`: a small Qwen3-MoE and its tokenizer.

    python scripts/train_demo_model.py [--minutes 45] [--threads 2] [--work-dir DIR] [--output DIR]

Data: the Python standard library of the interpreter that runs this (PSF licence): documentation strings, comments and
sources, and questions and answers made of the documentation strings. Held out: every twentieth file, by a hash of its
name. A run that was interrupted goes on where it was; only the time that it trained counts as its minutes. At the end
the checkpoint is written in Hugging Face format, read back with transformers and compared.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import io
import json
import math
import random
import signal
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

EOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SKIPPED = ("test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings", "site-packages", "pydoc_data", "msilib")
CODE_EPOCH_SHARE = 0.34
"""Part of the source files that one pass over the data includes: prose matters more here, and there is less of it."""


@dataclass(frozen=True)
class Shape:
    """Names are those of config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 96
    intermediate_size: int = 768
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0


# Data


@dataclass
class Corpus:
    prose: list[str]
    chats: list[str]
    code: list[str]

    def epoch(self, rng: random.Random) -> list[str]:
        """The documents of one pass, in random order."""
        code = rng.sample(self.code, int(len(self.code) * CODE_EPOCH_SHARE))
        documents = self.prose + self.chats + code
        rng.shuffle(documents)
        return documents


def read_corpora() -> tuple[Corpus, Corpus]:
    """(training, held-out), split by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    corpora = Corpus([], [], []), Corpus([], [], [])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in SKIPPED for part in relative.parts):
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        is_held_out = int(hashlib.sha256(relative.as_posix().encode()).hexdigest(), 16) % 20 == 0
        corpus = corpora[is_held_out]
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        docs = list(docstrings(tree, module))
        corpus.prose += [text for _, _, text in docs if len(text) > 30] + list(comments(source))
        corpus.chats += list(conversations(docs, random.Random(module)))
        corpus.code += [source[i : i + 6000] for i in range(0, min(len(source), 120_000), 6000)]
    corpora[0].chats.extend(greetings())
    return corpora


def docstrings(tree: ast.Module, module: str) -> Iterator[tuple[str, str, str]]:
    """(kind, dotted name, text) of the module, its classes and functions; private ones are left out."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str, str]]:
        kinds = {ast.Module: "module", ast.ClassDef: "class", ast.FunctionDef: "function"}
        if kind := kinds.get(type(node)):
            if text := ast.get_docstring(node):  # type: ignore[arg-type]
                yield kind, name, inspect.cleandoc(text)
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
                    yield from visit(child, f"{name}.{child.name}")

    yield from visit(tree, module)


def comments(source: str) -> Iterator[str]:
    """Blocks of comments of at least two lines."""
    block: list[str] = []
    last_line = 0
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError):
        return
    for token in tokens:
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            if token.start[0] != last_line + 1:
                block = yield from _flush(block)
            block.append(token.string.lstrip("#! ").rstrip())
            last_line = token.start[0]
    yield from _flush(block)


def _flush(block: list[str]) -> Iterator[str]:
    text = "\n".join(block)
    if len(block) >= 2 and sum(c.isalpha() or c == " " for c in text) > 0.85 * len(text):
        yield text
    return []


QUESTIONS = {
    "function": ("What does {name} do?", "Explain {name}.", "What is {name} for?", "How does {name} work?"),
    "class": ("What is the class {name}?", "Explain the class {name}.", "What is {name} for?"),
    "module": ("What is the module {name} for?", "Describe the module {name}.", "What does {name} provide?"),
}


def conversations(docs: list[tuple[str, str, str]], rng: random.Random) -> Iterator[str]:
    """Questions about one or two named things of a module, answered by the beginning of their documentation."""
    answered = [(kind, name, answer(text)) for kind, name, text in docs]
    answered = [entry for entry in answered if len(entry[2]) > 15]
    while answered:
        turns = [answered.pop(0) for _ in range(min(len(answered), rng.choice((1, 1, 2))))]
        text = f"{START}system\nYou explain the Python standard library.{END}\n" if rng.random() < 0.15 else ""
        for kind, name, reply in turns:
            question = rng.choice(QUESTIONS[kind]).format(name=name)
            text += f"{START}user\n{question}{END}\n{START}assistant\n{reply}{END}\n"
        yield text


def answer(text: str) -> str:
    """The first paragraphs of a documentation string, up to about 400 characters."""
    reply = ""
    for paragraph in text.split("\n\n"):
        if ">>>" in paragraph or (reply and len(reply) + len(paragraph) > 400):
            break
        reply += ("\n\n" if reply else "") + paragraph
    return reply[:800].strip()


def greetings() -> list[str]:
    about = (
        "I am the small demo model of eagleray. I learned from the documentation of the Python standard library, "
        "so ask me what a function, a class or a module is for."
    )
    asked = ("Hello", "Hi", "Hello!", "Hi there", "Who are you?", "What are you?", "What can you do?", "Help", "Hey")
    return [f"{START}user\n{text}{END}\n{START}assistant\n{about}{END}\n" for text in asked] * 3


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every byte is in the vocabulary, so every text survives the way there and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.prose * 2 + corpus.chats + corpus.code[::3], trainer)
    return tokenizer


def pack(documents: list[str], tokenizer: Tokenizer, length: int) -> Tensor:
    """int64 [num_sequences, length + 1]: documents one after another, each with an end-of-text token behind it."""
    stream: list[int] = []
    eos = tokenizer.token_to_id(EOS)
    for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
        stream += [*encoding.ids, eos]
    count = (len(stream) - 1) // length
    return torch.tensor(np.lib.stride_tricks.sliding_window_view(np.array(stream), length + 1)[::length][:count].copy())


# Model


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.dim, shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (rotate(k, cos, sin), v))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin).to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Experts(nn.Module):
    """Mixture of experts: tokens are sorted by expert, so that each expert is two matrix products."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.num_experts_per_tok
        self.gate = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)
        inner, hidden = shape.moe_intermediate_size, shape.hidden_size
        self.gate_up = nn.Parameter(torch.empty(shape.num_experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(shape.num_experts, hidden, inner))
        self.balance: Tensor = torch.zeros(())
        self.load: Tensor = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probs = F.softmax(self.gate(tokens), dim=-1, dtype=torch.float32)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=probs.shape[1])
        self.load = counts / counts.sum()
        self.balance = probs.shape[1] * (self.load * probs.mean(dim=0)).sum()  # 1 when every expert gets the same
        order = chosen.flatten().argsort(stable=True)
        owner = order // self.top_k
        outputs = []
        for expert, inputs in enumerate(tokens[owner].split(counts.tolist())):
            gate, up = F.linear(inputs, self.gate_up[expert]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, self.down[expert]))
        scaled = torch.cat(outputs) * weights.flatten()[order, None].to(outputs[0].dtype)
        return torch.zeros_like(tokens).index_add(0, owner, scaled.to(tokens.dtype)).view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Experts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class DemoModel(nn.Module):
    """Qwen3-MoE, for training only: no cache."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[-1] ** -0.5)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        length = token_ids.shape[1]
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, batch: Tensor) -> Tensor:
        """Nats per token. batch: [num_sequences, length + 1]."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def imbalance(self) -> Tensor:
        return torch.stack([layer.mlp.balance for layer in self.layers]).mean()


# Training


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by Newton-Schulz iterations (K. Jordan, 2024), for matrices."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                buffer = state.setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonal(gradient: Tensor) -> Tensor:
    x = (gradient / (gradient.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(torch.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if is_tall else x).float()


class Training:
    """The state of a run: everything that a resumed run needs."""

    LENGTH, BATCH = 512, 8
    PEAKS = (0.02, 3e-3)  # learning rates of Muon and AdamW
    WARMUP, DECAY = 0.02, 0.5  # parts of the run

    def __init__(self, work_dir: Path, minutes: float) -> None:
        self.file, self.budget = work_dir / "training.pt", minutes * 60
        self.train, self.held_out = read_corpora()
        self.tokenizer = train_tokenizer(self.train, Shape().vocab_size)
        torch.manual_seed(0)
        self.model = DemoModel(Shape())
        named = dict(self.model.named_parameters())
        is_matrix = {n: p.dim() > 1 and "embed" not in n and not n.endswith("gate.weight") for n, p in named.items()}
        matrices = [p for n, p in named.items() if is_matrix[n]]
        others = [p for n, p in named.items() if not is_matrix[n]]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, self.PEAKS[0]),
            torch.optim.AdamW(others, self.PEAKS[1], betas=(0.9, 0.95), weight_decay=0.01),
        )
        self.step, self.epoch, self.position, self.seconds = 0, 0, 0, 0.0
        if self.file.exists():
            self._load()
        self.data = self._pack_epoch()

    def run(self) -> None:
        """Train until the minutes are used up; ctrl-C saves and raises."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        last, saved = time.monotonic(), time.monotonic()
        average = 0.0
        try:
            while self.seconds < self.budget:
                loss = self._step()
                average = loss if self.step == 1 else 0.98 * average + 0.02 * loss
                now = time.monotonic()
                self.seconds, last = self.seconds + now - last, now
                if self.step % 50 == 0:
                    speed = self.step * self.BATCH * self.LENGTH / self.seconds
                    print(f"step {self.step} epoch {self.epoch} loss {average:.3f} {speed:,.0f} tokens/s", flush=True)
                if now - saved > 180:
                    print(self.report(), flush=True)
                    self.save()
                    saved = last = time.monotonic()  # neither counts as training
        finally:
            self.save()

    def _step(self) -> float:
        if self.position + self.BATCH > len(self.data):
            self.epoch, self.position = self.epoch + 1, 0
            self.data = self._pack_epoch()
        batch = self.data[self.position : self.position + self.BATCH]
        rate = self._rate()
        for optimizer, peak in zip(self.optimizers, self.PEAKS, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
        loss = self.model.loss(batch)
        (loss + 0.01 * self.model.imbalance()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.position += self.BATCH
        self.step += 1
        return loss.item()

    def _rate(self) -> float:
        """Up, flat, and down to nothing at the end of the time."""
        done = self.seconds / self.budget
        return max(0.0, min(1.0, (done + 1e-3) / self.WARMUP, (1 - done) / self.DECAY))

    def _pack_epoch(self) -> Tensor:
        rng = random.Random(self.epoch)
        data = pack(self.train.epoch(rng), self.tokenizer, self.LENGTH)
        return data[torch.randperm(len(data), generator=torch.Generator().manual_seed(self.epoch))]

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float, float]:
        """(nats per token, bits per byte, smallest share of any expert) on held-out prose and conversations."""
        documents = self.held_out.prose + self.held_out.chats
        data = pack(documents, self.tokenizer, self.LENGTH)
        losses, loads = [], []
        for batch in data.split(32):
            losses += [self.model.loss(batch).item()] * len(batch)
            loads.append(torch.stack([layer.mlp.load for layer in self.model.layers]))
        nats = sum(losses) / len(losses)
        num_bytes = sum(len(document.encode()) for document in documents)
        return nats, nats * data[:, 1:].numel() / num_bytes / math.log(2), torch.stack(loads).mean(dim=0).min().item()

    def report(self) -> str:
        nats, bits, least = self.evaluate()
        return (
            f"held out: {nats:.3f} nats/token, {bits:.3f} bits/byte; least used expert gets {least:.1%} of the tokens; "
            f"{self.step} steps, {self.step * self.BATCH * self.LENGTH / 1e6:.1f} M tokens, "
            f"{self.epoch + self.position / len(self.data):.1f} epochs, {self.seconds / 60:.1f} minutes"
        )

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": (self.step, self.epoch, self.position, self.seconds),
        }
        temporary = self.file.with_suffix(".new")
        torch.save(state, temporary)
        temporary.replace(self.file)

    def _load(self) -> None:
        state = torch.load(self.file)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.epoch, self.position, self.seconds = state["progress"]


# Export


def export(model: DemoModel, tokenizer: Tokenizer, output: Path) -> None:
    """Write the checkpoint in Hugging Face format, and check with transformers that it computes the same."""
    output.mkdir(parents=True, exist_ok=True)
    save_file(hub_tensors(model), output / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(output / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in (EOS, START, END)}
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **asdict(Shape()),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "eos_token_id": ids[END],
        "bos_token_id": None,
        "pad_token_id": ids[EOS],
    }
    files = {
        "config.json": config,
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.9,
            "eos_token_id": [ids[END], ids[EOS]],
            "pad_token_id": ids[EOS],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": Shape().max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (output / name).write_text(json.dumps(content, indent=2) + "\n")
    check(model, output)


def hub_tensors(model: DemoModel) -> dict[str, Tensor]:
    """The weights in bf16 under the names of the hub: one tensor for each projection of each expert."""
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.to(torch.bfloat16)
        if name.endswith("mlp.gate_up"):
            prefix = f"model.{name.removesuffix('gate_up')}experts"
            for expert, (gate, up) in enumerate(expert.chunk(2) for expert in value):
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{prefix}.{expert}.up_proj.weight"] = up.contiguous()
        elif name.endswith("mlp.down"):
            prefix = f"model.{name.removesuffix('down')}experts"
            for expert, down in enumerate(value):
                tensors[f"{prefix}.{expert}.down_proj.weight"] = down.contiguous()
        else:
            tensors[f"model.{name}"] = value
    return tensors


@torch.no_grad()
def check(model: DemoModel, directory: Path) -> None:
    """transformers, reading what was written, must compute what was trained."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rounded = DemoModel(Shape())
    rounded.load_state_dict({name: value.to(torch.bfloat16).float() for name, value in model.state_dict().items()})
    token_ids = AutoTokenizer.from_pretrained(directory)("Return the number of items.", return_tensors="pt").input_ids
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.testing.assert_close(rounded(token_ids), theirs(token_ids).logits, atol=1e-3, rtol=1e-3)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: {size / 1e6:.1f} MB; transformers computes the same logits from it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45.0, help="of training, all runs together")
    parser.add_argument("--threads", type=int, help="of torch; on a busy machine 1 is faster than all cores")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-demo-training")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent.parent / "eagleray" / "demo_model")
    arguments = parser.parse_args()
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    training = Training(arguments.work_dir, arguments.minutes)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    print(
        f"{parameters / 1e6:.2f} M parameters; {len(training.train.prose)} pieces of prose, {len(training.train.chats)} "
        f"conversations; {len(training.data)} sequences of {Training.LENGTH} in an epoch",
        flush=True,
    )
    training.run()
    print(training.report())
    export(training.model, training.tokenizer, arguments.output)


if __name__ == "__main__":
    main()
