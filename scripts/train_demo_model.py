"""Train the small Qwen3-MoE checkpoint that ships in `eagleray/demo_model`.

The text is the Python standard library's own (sources, docstrings, language reference; PSF licence), which is on every
machine with Python, so the model can be made again anywhere, without a download, within an hour on two CPU cores:

    python scripts/train_demo_model.py --export eagleray/demo_model

A run saves itself in --work-dir every few minutes and on SIGTERM or ctrl-C; the same command continues from there.
Only `export` writes to the package; it first checks the written files.
"""

import argparse
import ast
import copy
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

# The C library and OpenMP read these when a process starts, hence the re-exec in `main`. Freed memory is kept, in huge
# pages, because faulting it in again costs as much as the arithmetic. Threads sleep at a barrier, because on a shared
# machine spinning for a partner that is not scheduled is several times slower.
PROCESS_ENV = {
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_THRESHOLD_": str(2**33),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_ID, IM_END_ID = 0, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen2's: a leading space or sign stays with its word, every digit stands alone.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONFIG = {
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

BATCH_TOKENS = 4096
ROW_LEN, LONG_ROW_LEN = 512, 2048
LONG_FROM = 0.85  # the last part of a run sees rows as long as max_position_embeddings
PEAK_LR, WARMUP_STEPS, DECAY_FROM = 4e-3, 50, 0.4  # then linearly to zero
SAVE_EVERY_S, EVAL_EVERY_S = 180, 300
PROSE_REPEATS = 2

SKIPPED_DIRS = {"site-packages", "test", "tests", "idlelib", "turtledemo", "encodings", "pydoc_data", "_bundled"}
# Written in C, so their documentation is in no source file. Importing these has no side effect.
C_MODULES = ("builtins", "math", "cmath", "itertools", "time", "array", "zlib", "binascii")
# Where a module's names are known by another module's name.
KNOWN_AS = {"posixpath": "os.path", "genericpath": "os.path", "asyncio.": "asyncio", "unittest.case": "unittest"}


@dataclass(frozen=True)
class Entry:
    """Documented name, or section of the language reference (kind "topic")."""

    kind: str
    module: str
    name: str  # within its module; empty for the module itself
    signature: str
    doc: str

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}" if self.name and self.module != "builtins" else self.name or self.module

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.full_name.split("."))


@dataclass
class Corpus:
    """Texts of one side of the split. The code, prose and dialogues of a file are always on the same side."""

    code: list[str] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)
    chat: list[str] = field(default_factory=list)


def is_held_out(name: str) -> bool:
    """Whether a file is held out: one in twenty, by its name alone, so that all machines with the same Python agree."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def build_corpus() -> tuple[Corpus, Corpus]:
    """Return the training and the held-out side, in an order that depends on file names only."""
    train, held_out = Corpus(), Corpus()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        is_generated = "-" in str(relative)  # config-3.x and _sysconfigdata
        if is_generated or SKIPPED_DIRS.intersection(relative.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # lib2to3 keeps files of other Python versions
        if len(source) < 200:
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        entries = list(documented_names(tree, module))
        side = held_out if is_held_out(relative.as_posix()) else train
        side.code.append(source)
        side.prose += [text for text in (reference_page(entries), comments(source)) if len(text) > 200]
        side.chat += dialogues(entries)
    for module in C_MODULES:
        entries = list(compiled_names(module))
        train.prose.append(reference_page(entries))
        train.chat += dialogues(entries)
    topics = ast.parse((root / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    for text in ast.literal_eval(next(node.value for node in topics.body if isinstance(node, ast.Assign))).values():
        title, _, body = text.partition("\n")
        train.prose.append(text)
        train.chat += dialogues([Entry("topic", "python", title.replace('"', "`"), "", body.strip("*\n "))])
    train.chat += small_talk()
    return train, held_out


def documented_names(tree: ast.Module, module: str) -> Iterator[Entry]:
    """Return everything in a source file that has a docstring, in its order. The file is parsed, never imported."""
    if doc := ast.get_docstring(tree):
        yield Entry("module", module, "", "", doc)
    module = next((name for start, name in KNOWN_AS.items() if module.startswith(start)), module)

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[Entry]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                if doc := ast.get_docstring(node):
                    yield Entry("class", module, prefix + node.name, "", doc)
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(node)):
                arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
                yield Entry("method" if prefix else "function", module, prefix + node.name, f"({arguments})", doc)

    yield from walk(tree.body, "")


def compiled_names(module: str) -> Iterator[Entry]:
    """Return the documented names of a module without a source file."""
    owner = import_module(module)
    yield Entry("module", module, "", "", inspect.getdoc(owner) or "")
    for name, value in sorted(vars(owner).items()):
        if name.startswith("_") or not callable(value) or not (doc := inspect.getdoc(value)):
            continue
        is_class = isinstance(value, type)
        yield Entry("class" if is_class else "function", module, name, "" if is_class else signature_of(value), doc)
        if is_class and not issubclass(value, BaseException):
            for part, method in sorted(vars(value).items()):
                if not part.startswith("_") and callable(method) and (doc := inspect.getdoc(method)):
                    yield Entry("method", module, f"{name}.{part}", signature_of(method), doc)


def signature_of(value: object) -> str:
    text = getattr(value, "__text_signature__", None) or ""
    return text.replace("$self, /, ", "").replace("$self, ", "").replace("$self", "").replace("$module, ", "")


def reference_page(entries: list[Entry]) -> str:
    return "\n\n".join(f"{entry.full_name}{entry.signature}\n\n{inspect.cleandoc(entry.doc)}" for entry in entries)


def comments(source: str) -> str:
    """Return the comment blocks of a file as paragraphs, without rulers, commented-out code and one-line remarks."""
    blocks: list[list[str]] = [[]]
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last_line + 1:
            blocks.append([])
        blocks[-1].append(token.string.lstrip("#! "))
        last_line = token.start[0]
    paragraphs = (" ".join(block).strip() for block in blocks)
    return "\n\n".join(p for p in paragraphs if len(p) > 60 and sum(c.isalpha() or c == " " for c in p) > 0.85 * len(p))


DIALOGUES_PER_ENTRY = 3
QUESTIONS = {
    "module": ["What is the module {full} for?", "What does the {full} module do?", "Tell me about the module {full}.",
               "How do I use {full}?", "Explain the {full} module.", "What is {full}?", "Describe {full}.",
               "What can I do with {full}?"],
    "class": ["How do I use the class {name} of module {module}?", "What is {full}?", "Explain the class {full}.",
              "What is the class {name} for?", "Tell me about {full}.", "Describe the class {name} from {module}."],
    "function": ["What does {full} do?", "Explain {full}.", "How do I use {full}?", "What is {full} for?",
                 "Tell me about {full}.", "Describe the function {name} of module {module}.",
                 "What does the function {name} do?", "When would I use {full}?"],
    "method": ["What does {full} do?", "Explain {full}.", "How do I use {name}?", "What does the method {name} do?",
               "Tell me about {full}.", "Describe {name} from the module {module}."],
    "topic": ["Explain {name}.", "Tell me about {name} in Python.", "What should I know about {name}?", "{name}"],
}  # fmt: skip
FOLLOW_UPS = ["And {name}?", "What about {full}?", "Thanks. And what does {full} do?", "How does {name} differ?"]
SYSTEM_MESSAGES = ["You are a helpful assistant.", "You are eagleray's demo model.", "Answer briefly.",
                   "You are an expert in Python.", "Answer questions about Python's standard library."]  # fmt: skip
HELLO = "Hello! I am eagleray's small embedded demo model, trained on Python's documentation strings. "
ASK_ME = "Ask me about a module or a function of Python's standard library, for example `json.dumps` or `textwrap`."
LIMITS = "I am only a very small demo model and know little besides Python's standard library. " + ASK_ME
GREETINGS = """Hello|Hello!|Hi|Hi!|Hi there|Hey|Good morning|Hello, who are you?|Who are you?|What are you?
What is your name?|Introduce yourself.|Hello, how are you?|Are you there?""".replace("\n", "|").split("|")
OFF_TOPIC = """Tell me a story.|Write a poem.|What is the capital of France?|What is 2 + 2?|Tell me a joke.|Help
What is the weather today?|Translate this to French.|Who won the match?|What is the meaning of life?|Count to ten.
What can you do?|Can you help me?|Write an essay about history.""".replace("\n", "|").split("|")


def dialogues(entries: list[Entry]) -> list[str]:
    """Make questions about the public names of a module, answered by the first paragraphs of their docstrings."""
    known = [(entry, text) for entry in entries if entry.is_public and (text := answer(entry))]
    rng = random.Random(known[0][0].full_name if known else 0)
    texts = []
    for _ in range(DIALOGUES_PER_ENTRY):
        for i, (entry, text) in enumerate(known):
            turns = [("system", rng.choice(SYSTEM_MESSAGES))] if rng.random() < 0.2 else []
            question = rng.choice(QUESTIONS[entry.kind])
            if "How do I use" in question and entry.signature:
                text = f"Call it as `{entry.full_name}{entry.signature}`.\n\n{text}"
            turns += [("user", ask(question, entry)), ("assistant", text)]
            if len(known) > 1 and rng.random() < 0.25:
                other, other_text = known[(i + rng.randrange(1, min(len(known), 8))) % len(known)]
                turns += [("user", ask(rng.choice(FOLLOW_UPS), other)), ("assistant", other_text)]
            texts.append(render_chat(turns))
    return texts


def ask(template: str, entry: Entry) -> str:
    return template.format(full=entry.full_name, name=entry.name, module=entry.module)


def small_talk() -> list[str]:
    thanks = [("user", "Thanks!"), ("assistant", "You are welcome. " + ASK_ME)]
    greetings = [[("user", text), ("assistant", HELLO + ASK_ME)] for text in GREETINGS]
    off_topic = [[("user", text), ("assistant", LIMITS)] for text in OFF_TOPIC]
    plain = greetings + off_topic + [turns + thanks for turns in greetings[:4]]
    prompted = [[("system", system), *turns] for system in SYSTEM_MESSAGES for turns in greetings + off_topic]
    return [render_chat(turns) for turns in plain * 10 + prompted * 2]


def render_chat(turns: list[tuple[str, str]]) -> str:
    return "".join(f"{IM_START}{role}\n{text}{IM_END}\n" for role, text in turns)


def answer(entry: Entry) -> str:
    """Return a docstring's first paragraphs as running text of at most about 500 characters; "" if not prose."""
    chosen: list[str] = []
    for paragraph in inspect.cleandoc(entry.doc).split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        is_call = re.match(rf"({entry.name.rpartition('.')[2] or ' '}|[\w.]+)\(.*\)( ->.*)?$", lines[0])
        if is_call and not chosen:  # builtins repeat their signature first
            lines = lines[1:]
        text = " ".join(line.strip() for line in lines)
        is_prose = text and not any(line.startswith((" ", ">>>", "-", "*", "=")) for line in lines)
        if not is_prose or sum(map(len, chosen)) + len(text) > 500:
            if is_prose or chosen:
                break
            continue
        chosen.append(text)
    joined = "\n\n".join(chosen)
    return joined if len(joined) > 20 and joined[0].isalpha() else ""


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """A byte-level BPE with all 256 bytes in its vocabulary, so that it round-trips every text."""
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
    tokenizer.train_from_iterator(corpus.code + corpus.prose * PROSE_REPEATS + corpus.chat, trainer)
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Tensor]:
    return [torch.tensor([*encoding.ids, END_ID]) for encoding in tokenizer.encode_batch(texts)]


def pack(documents: list[Tensor], row_len: int) -> Tensor:
    """Lay documents end to end in rows of `row_len` tokens and the one that follows.  # [num_rows, row_len + 1]

    When a row ends inside a document, a rest shorter than a quarter row is dropped, so that many rows begin as a
    request does, at the start of a document.
    """
    size = row_len + 1
    pieces: list[Tensor] = []
    filled = 0
    for document in documents:
        while True:
            piece = document[: size - filled]
            pieces.append(piece)
            filled = (filled + len(piece)) % size
            document = document[len(piece) :]
            if len(document) < row_len // 4:
                break
    tokens = torch.cat(pieces)
    return tokens[: len(tokens) // size * size].view(-1, size)


class Feed:
    """Batches of the training documents, epoch after epoch; its position is three numbers, so that a run can resume."""

    def __init__(self, documents: list[Tensor], *, epoch: int = 0, row: int = 0, row_len: int = ROW_LEN):
        self.documents = documents
        self.start(epoch=epoch, row=row, row_len=row_len)

    def start(self, *, epoch: int, row: int, row_len: int) -> None:
        rng = random.Random(epoch)
        self.rows = pack(rng.sample(self.documents, len(self.documents)), row_len)
        self.rows = self.rows[torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(epoch))]
        self.position = {"epoch": epoch, "row": row, "row_len": row_len}

    def next_batch(self, row_len: int) -> Tensor:
        """Return the next rows, about BATCH_TOKENS tokens.  # [batch, row_len + 1]"""
        epoch, row, num_rows = self.position["epoch"], self.position["row"], BATCH_TOKENS // row_len
        if row_len != self.position["row_len"] or row + num_rows > len(self.rows):
            self.start(epoch=epoch + 1, row=0, row_len=row_len)
            row = 0
        self.position["row"] = row + num_rows
        return self.rows[row : row + num_rows]


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made near-orthogonal (Jordan et al. 2024), with AdamW's step size (Liu et al. 2025).

    It takes stacks of matrices, [..., rows, columns], as the experts' weights are.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(momentum, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices by five Newton-Schulz steps.  # [..., rows, columns]"""
    x = matrices.reshape(-1, *matrices.shape[-2:]).bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype).reshape(matrices.shape)


def expert_use(router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the balance loss of a layer's router (Switch, eq. 4; 1 when even) and each expert's share of its tokens.

    transformers' own loss adds the layers up first, so that one layer's neglected expert hides behind another's.
    """
    probs = router_logits.float().softmax(-1)  # [num_tokens, num_experts]
    top_k = CONFIG["num_experts_per_tok"]
    share = torch.zeros_like(probs).scatter(1, probs.topk(top_k).indices, 1 / top_k).mean(0)
    return CONFIG["num_experts"] * (share * probs.mean(0)).sum(), share


class Run:
    """A training run: everything that a checkpoint holds, and the loop that moves it forward."""

    COUNTERS = ("step", "seconds", "tokens", "losses")

    def __init__(self, work_dir: Path, minutes: float, steps: int | None):
        torch.manual_seed(0)
        self.minutes, self.num_steps = minutes, steps
        self.checkpoint = work_dir / "checkpoint.pt"
        train, held_out = build_corpus()
        tokenizer_file = work_dir / "tokenizer.json"
        if not tokenizer_file.exists():
            train_tokenizer(train).save(str(tokenizer_file))
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        code, prose, chat = (encode(self.tokenizer, texts) for texts in (train.code, train.prose, train.chat))
        self.feed = Feed(code + prose * PROSE_REPEATS + chat)
        self.epoch_tokens = self.feed.rows.numel()
        self.held_out = {kind: pack(encode(self.tokenizer, texts), ROW_LEN) for kind, texts in vars(held_out).items()}
        self.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
        named = dict(self.model.named_parameters())
        matrices = [p for name, p in named.items() if "proj" in name]
        others = [p for name, p in named.items() if "proj" not in name]  # embedding, norms, routers
        adamw = torch.optim.AdamW(others, PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimizers = [Muon(matrices, PEAK_LR), adamw]
        self.step, self.seconds, self.tokens, self.losses = 0, 0.0, 0, {}
        if self.checkpoint.exists():
            self.load()

    @property
    def progress(self) -> float:
        """Progress from 0 to 1 over the budget of steps if there is one, else of time."""
        return min(1.0, self.step / self.num_steps if self.num_steps else self.seconds / (60 * self.minutes + 1e-9))

    def load(self) -> None:
        state = torch.load(self.checkpoint)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.feed.start(**state["position"])
        for name in self.COUNTERS:
            setattr(self, name, state[name])

    def save(self) -> None:
        state = {name: getattr(self, name) for name in self.COUNTERS}
        state |= {"model": self.model.state_dict(), "position": self.feed.position}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def train(self) -> None:
        """Train until the budget is spent or the process is told to stop; the run is saved in both cases."""
        told_to_stop = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: told_to_stop.append(True))
        bar = tqdm(total=1.0, initial=self.progress, bar_format="{percentage:5.1f}% {postfix}", mininterval=10)
        saved = evaluated = self.seconds
        while self.progress < 1.0 and not told_to_stop:
            started = time.monotonic()
            loss, balance, speed = self.train_step()
            if self.seconds - evaluated > EVAL_EVERY_S:
                evaluated = self.seconds
                self.evaluate(max_rows=32)
            self.seconds += time.monotonic() - started
            if self.seconds - saved > SAVE_EVERY_S:
                saved = self.seconds
                self.save()
            text = f"step {self.step} loss {loss:.3f} balance {balance:.2f} {speed:.0f} tokens/s"
            bar.set_postfix_str(text, refresh=False)
            bar.update(self.progress - bar.n)
        bar.close()
        if self.progress == 1.0:
            self.evaluate()
        self.save()

    def train_step(self) -> tuple[float, float, float]:
        started = time.monotonic()
        scale = min(1.0, (self.step + 1) / WARMUP_STEPS, (1 - self.progress) / (1 - DECAY_FROM))
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = PEAK_LR * scale
        rows = self.feed.next_batch(LONG_ROW_LEN if self.progress >= LONG_FROM else ROW_LEN)
        loss, router_logits = self.forward(rows)
        balance = torch.stack([expert_use(layer)[0] for layer in router_logits]).mean()
        (loss + CONFIG["router_aux_loss_coef"] * balance).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        num_tokens = rows[:, 1:].numel()
        self.step, self.tokens = self.step + 1, self.tokens + num_tokens
        return loss.item(), balance.item(), num_tokens / (time.monotonic() - started)

    def forward(self, rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the mean loss in nats per token, and each layer's router logits."""
        with torch.autocast("cpu", torch.bfloat16):
            out = self.model.model(rows[:, :-1], use_cache=False, output_router_logits=True)
            logits = self.model.lm_head(out.last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()), out.router_logits

    @torch.no_grad()
    def evaluate(self, max_rows: int | None = None) -> None:
        """Report the held-out loss of each kind of text (nats per token, bits per byte), and the experts' shares."""
        words = [self.tokenizer.id_to_token(i) for i in range(CONFIG["vocab_size"])]  # one character is one byte
        num_bytes = torch.tensor([0 if word in (END, IM_START, IM_END) else len(word) for word in words])
        shares = []
        for kind, rows in self.held_out.items():
            losses = []
            for row in rows[:max_rows].split(1):
                loss, router_logits = self.forward(row)
                losses.append(loss.item())
                shares.append(torch.stack([expert_use(layer)[1] for layer in router_logits]))
            targets = rows[:max_rows, 1:]
            nats = sum(losses) / len(losses)
            self.losses[kind] = (nats, nats * targets.numel() / math.log(2) / num_bytes[targets].sum().item())
        text = ", ".join(f"{kind} {loss:.3f} ({bits:.3f} bits/byte)" for kind, (loss, bits) in self.losses.items())
        tqdm.write(f"step {self.step}, {self.tokens / 1e6:.2f} M tokens, {self.seconds / 60:.1f} min: held-out {text}")
        for number, layer in enumerate(torch.stack(shares).mean(0)):
            tqdm.write(f"  layer {number} experts' shares in %: " + " ".join(f"{100 * share:.1f}" for share in layer))


def export(run: Run, target: Path) -> None:
    """Write the checkpoint in the hub's format beside `target`, check it, then move its files in one by one."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".demo_model_") as name:
        staging = Path(name)
        model = with_parameters_in(torch.bfloat16, run.model)
        model.save_pretrained(staging)
        run.tokenizer.save(str(staging / "tokenizer.json"))
        for file, value in json_files().items():  # over save_pretrained's, whose config.json names fields as v5 does
            (staging / file).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        verify(run, with_parameters_in(torch.float32, model), staging)
        (staging / "MODEL_CARD.md").write_text(model_card(run, samples(staging)), encoding="utf-8")
        for path in staging.iterdir():
            path.chmod(0o644)
            path.replace(target / path.name)
    print(f"exported to {target}: {sum(path.stat().st_size for path in target.iterdir())} bytes")


def with_parameters_in(dtype: torch.dtype, model: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    """Copy a model to `dtype`; unlike `model.to(dtype)`, it keeps the precision of a buffer, the rotary frequencies."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def json_files() -> dict[str, dict]:
    return {
        "config.json": CONFIG,
        "generation_config.json": {
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.9,
            "eos_token_id": [IM_END_ID, END_ID],
            "pad_token_id": END_ID,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "additional_special_tokens": [IM_START, IM_END],
            "eos_token": IM_END,
            "pad_token": END,
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }


@torch.no_grad()
def verify(run: Run, model: Qwen3MoeForCausalLM, checkpoint: Path) -> None:
    """Check that the files have the hub's names, load to the same logits, and round-trip any text."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        experts = {name for name in file.keys() if ".experts." in name}  # noqa: SIM118  a file, not a dict
    layers, numbers = range(CONFIG["num_hidden_layers"]), range(CONFIG["num_experts"])
    assert experts == {
        f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"
        for layer, number, part in itertools.product(layers, numbers, ("gate", "up", "down"))
    }
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    rows = run.held_out["prose"][:4, :-1]
    torch.testing.assert_close(loaded(rows).logits, model(rows).logits, atol=1e-3, rtol=1e-3)

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    alphabet = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    text = "".join(alphabet + random.Random(0).choices(alphabet, k=10_000)) + "  \n\t\r\n 1234 def f(x):\n        x\n"
    assert run.tokenizer.decode(run.tokenizer.encode(text).ids) == text
    assert tokenizer.decode(tokenizer.encode(text, verbose=False)) == text
    turns = [("system", "Be brief."), ("user", "What is json?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == render_chat(turns) + f"{IM_START}assistant\n"


SAMPLE_PROMPTS = ["def read(self", "The function returns", "Return a"]
SAMPLE_QUESTIONS = ["Hello", "What does json.dumps do?", "Explain shutil.copytree.", "What is the module textwrap for?"]


def samples(checkpoint: Path) -> list[tuple[str, str]]:
    """Return prompts with the checkpoint's completions at its default sampling parameters."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    torch.manual_seed(0)
    pairs = []
    for prompt in SAMPLE_PROMPTS + SAMPLE_QUESTIONS:
        text = prompt
        if prompt in SAMPLE_QUESTIONS:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=100)
        pairs.append((prompt, tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)))
    return pairs


def model_card(run: Run, pairs: list[tuple[str, str]]) -> str:
    num_parameters = sum(p.numel() for p in run.model.parameters())
    rows = "\n".join(f"| {kind} | {loss:.3f} | {bits:.3f} |" for kind, (loss, bits) in run.losses.items())
    shown = "\n\n".join(f"Prompt: `{prompt}`\n\n````text\n{text.strip()}\n````" for prompt, text in pairs)
    return f"""# eagleray's demo model

A Qwen3-MoE of {num_parameters / 1e6:.2f} million parameters that ships inside the package, so that `eagleray serve`
answers with no download. It shows that the engine works, not what a language model can do: it writes English and Python
in the manner of the standard library's documentation, and much of what it says is wrong.

## Shape

`Qwen3MoeForCausalLM`, bf16: {CONFIG["num_hidden_layers"]} layers, hidden size {CONFIG["hidden_size"]},
{CONFIG["num_attention_heads"]} heads and {CONFIG["num_key_value_heads"]} key-value heads of {CONFIG["head_dim"]},
{CONFIG["num_experts"]} experts of {CONFIG["moe_intermediate_size"]} with {CONFIG["num_experts_per_tok"]} per token,
tied embeddings, {CONFIG["max_position_embeddings"]} positions. Its own byte-level BPE of {CONFIG["vocab_size"]} tokens
round-trips every text; the chat template is ChatML.

## Data and licence

The standard library of CPython {sys.version.split()[0]}: its sources; its docstrings and comments as prose, seen
{PROSE_REPEATS} times an epoch; the language reference in `pydoc_data.topics`; the docstrings of a few modules written
in C; and questions and answers made from the docstrings by templates. All of it is under the PSF licence
(<https://docs.python.org/3/license.html>), copyright the Python Software Foundation. An epoch is
{run.epoch_tokens / 1e6:.1f} million tokens. One source file in twenty, chosen by a hash of its path, is held out with
everything made from it.

## Training

{run.step} steps, {run.tokens / 1e6:.1f} million tokens, {run.seconds / 60:.0f} minutes of wall time on two shared CPU
cores. Muon for the matrices and AdamW for the rest, rows of {ROW_LEN} tokens, and of {LONG_ROW_LEN} for the last
{1 - LONG_FROM:.0%} of the budget. Held-out loss at the end:

| text | nats per token | bits per byte |
|---|---|---|
{rows}

To repeat it, with the packages of the `test` extra installed:

    python scripts/train_demo_model.py --minutes {run.minutes:g} --export eagleray/demo_model

## Samples

At the default sampling parameters (temperature 0.7, top-p 0.9), first try:

{shown}
"""


def main() -> None:
    if any(os.environ.get(name) != value for name, value in PROCESS_ENV.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | PROCESS_ENV)
    parser = argparse.ArgumentParser(description="Train the demo model, or carry on with a run that was stopped.")
    parser.add_argument("--minutes", type=float, default=50, help="training time over which the learning rate anneals")
    parser.add_argument("--steps", type=int, help="anneal over this many steps instead")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-demo-model")
    parser.add_argument("--export", type=Path, metavar="DIR", help="where to write the checkpoint at the end")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    run = Run(args.work_dir, args.minutes, args.steps)
    run.train()
    if args.export and run.progress == 1.0:
        export(run, args.export)


if __name__ == "__main__":
    main()
