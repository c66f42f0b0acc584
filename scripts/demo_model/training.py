"""Training run of the embedded model: its data, its schedule, and the checkpoint from which it continues."""

from __future__ import annotations

import math
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from demo_model.accuracy import exact_share, held_out_probes
from demo_model.checkpoint import CONFIG, END, IM_END, IM_START, render_chat, train_tokenizer
from demo_model.corpus import Corpus, build_corpus
from demo_model.dialogues import DialogueSampler
from demo_model.experts import use_permuted_experts
from demo_model.facts import choose_facts
from demo_model.feed import IGNORED, ChatFeed, TextFeed, encode, pack
from demo_model.muon import Muon
from demo_model.phrasings import split_questions

TOKENS_OF_A_KIND = 2048  # of conversations, and as many of running text, in each step
TEXT_ROW_LEN, LONG_TEXT_ROW_LEN = 512, 2048
LONG_FROM = 0.85  # the last part of a run sees rows as long as max_position_embeddings
CHAT_ROW_LEN, LONG_CHAT_ROW_LEN, LONG_CHAT_EVERY = 256, 1024, 4
CHAT_WEIGHT, TEXT_WEIGHT = 0.5, 0.5
PROSE_REPEATS = 2
PEAK_LR, WARMUP_STEPS, DECAY_FROM = 4e-3, 50, 0.4  # then linearly to zero
SAVE_EVERY_S, EVALUATE_EVERY_S = 180, 300
EVALUATION_ROWS = 24
TOKENIZER_CHATS = 20_000


@dataclass(frozen=True)
class Budget:
    """Extent of a run: a number of steps if there is one, else minutes of training."""

    minutes: float
    num_steps: int | None = None

    def progress(self, step: int, seconds: float) -> float:
        """Return the part of the run that is done, from 0 to 1."""
        return min(1.0, step / self.num_steps if self.num_steps else seconds / (60 * self.minutes + 1e-9))


def learning_rate(step: int, progress: float) -> float:
    """Warm up, stay at the peak, then fall linearly to zero."""
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS, (1 - progress) / (1 - DECAY_FROM))


class TrainingRun:
    """Everything that a checkpoint holds, and the loop that moves it forward.

    A run that is continued sees the same data as one that was never stopped; with a budget of steps it does the same.
    """

    COUNTERS = ("step", "seconds", "tokens", "losses", "accuracy")

    def __init__(self, work_dir: Path, budget: Budget, num_facts: int | None = None):
        torch.manual_seed(0)
        self.budget = budget
        self.checkpoint = work_dir / "checkpoint.pt"
        train, held_out = build_corpus()
        split = split_questions(choose_facts(num_facts))
        sampler = DialogueSampler(split, train.names, train.lines())
        self.tokenizer = _tokenizer(work_dir / "tokenizer.json", train, sampler)
        code, prose = encode(self.tokenizer, train.code), encode(self.tokenizer, train.prose)
        self.epoch_tokens = sum(map(len, code + prose * PROSE_REPEATS))
        self.text_feed = TextFeed(code + prose * PROSE_REPEATS)
        self.chat_feed = ChatFeed(self.tokenizer, sampler)
        texts = {"code": held_out.code, "prose": held_out.prose}
        self.held_out = {kind: pack(encode(self.tokenizer, of_kind), TEXT_ROW_LEN) for kind, of_kind in texts.items()}
        self.probes = held_out_probes(split)
        self.model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG))
        use_permuted_experts(self.model)
        named = dict(self.model.named_parameters())
        matrices = [p for name, p in named.items() if "proj" in name]
        others = [p for name, p in named.items() if "proj" not in name]  # embedding, norms, routers
        adamw = torch.optim.AdamW(others, PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0)
        self.optimizers: list[torch.optim.Optimizer] = [Muon(matrices, PEAK_LR), adamw]
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.losses: dict[str, tuple[float, float]] = {}
        self.accuracy: dict[str, float] = {}
        if self.checkpoint.exists():
            self.load()

    @property
    def progress(self) -> float:
        return self.budget.progress(self.step, self.seconds)

    def load(self) -> None:
        state = torch.load(self.checkpoint)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.text_feed.seek(**state["position"])
        for name in self.COUNTERS:
            setattr(self, name, state[name])

    def save(self) -> None:
        """Write the checkpoint beside the old one, then replace it, so that there is always a whole one."""
        state: dict[str, Any] = {name: getattr(self, name) for name in self.COUNTERS}
        state |= {"model": self.model.state_dict(), "position": self.text_feed.position}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def train(self) -> None:
        """Train until the budget is spent or the process is told to stop; the run is saved in both cases."""
        told_to_stop: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: told_to_stop.append(number))
        bar = tqdm(total=1.0, initial=self.progress, bar_format="{percentage:5.1f}% {postfix}", mininterval=10)
        saved = evaluated = self.seconds
        while self.progress < 1.0 and not told_to_stop:
            started = time.monotonic()
            tokens_before = self.tokens
            losses = self.train_step()
            duration = time.monotonic() - started
            self.seconds += duration
            if self.seconds - evaluated > EVALUATE_EVERY_S and self.progress < 1.0:
                evaluated = self.seconds
                self.evaluate(EVALUATION_ROWS)
            if self.seconds - saved > SAVE_EVERY_S:
                saved = self.seconds
                self.save()
            shown = " ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            speed = (self.tokens - tokens_before) / duration
            bar.set_postfix_str(f"step {self.step} {shown} {speed:.0f} tokens/s", refresh=False)
            bar.update(self.progress - bar.n)
        bar.close()
        if self.progress == 1.0:
            self.evaluate()
        self.save()

    def train_step(self) -> dict[str, float]:
        """Take one step and return the losses by their names."""
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(self.step, self.progress)
        chat_row_len = CHAT_ROW_LEN if self.step % LONG_CHAT_EVERY else LONG_CHAT_ROW_LEN
        text_row_len = TEXT_ROW_LEN if self.progress < LONG_FROM else LONG_TEXT_ROW_LEN
        losses: dict[str, float] = {}
        for kind, weight, (inputs, targets) in (
            ("chat", CHAT_WEIGHT, self.chat_feed.rows_of_step(self.step, TOKENS_OF_A_KIND, chat_row_len)),
            ("text", TEXT_WEIGHT, self.text_feed.next_rows(TOKENS_OF_A_KIND, text_row_len)),
        ):
            loss, router_logits = self.forward(inputs, targets)
            balance = torch.stack([expert_use(layer)[0] for layer in router_logits]).mean()
            (weight * (loss + CONFIG["router_aux_loss_coef"] * balance)).backward()
            losses |= {kind: loss.item(), f"{kind} balance": balance.item()}
            self.tokens += inputs.numel()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            if norm.isfinite():  # an overflow costs one step, not the run
                optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return losses

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the mean loss in nats per target, and each layer's router logits."""
        with torch.autocast("cpu", torch.bfloat16):
            out = self.model.model(inputs, use_cache=False, output_router_logits=True)
            is_target = targets != IGNORED
            logits = self.model.lm_head(out.last_hidden_state[is_target])
        return F.cross_entropy(logits.float(), targets[is_target]), out.router_logits

    def logits_of(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits: Tensor = self.model(ids, use_cache=False).logits
        return logits

    @torch.no_grad()
    def evaluate(self, max_rows: int | None = None) -> None:
        """Report held-out losses (nats per token, bits per byte), exact answers, and the experts' shares of tokens."""
        words = [self.tokenizer.id_to_token(i) or "" for i in range(CONFIG["vocab_size"])]  # one character is one byte
        num_bytes = torch.tensor([0 if word in (END, IM_START, IM_END) else len(word) for word in words])
        shares = []
        for kind, rows in self.held_out.items():
            total = 0.0
            for part in torch.split(rows[:max_rows], 4):
                loss, router_logits = self.forward(part[:, :-1], part[:, 1:])
                total += loss.item() * part[:, 1:].numel()
                shares.append(torch.stack([expert_use(layer)[1] for layer in router_logits]))
            targets = rows[:max_rows, 1:]
            self.losses[kind] = (total / targets.numel(), total / math.log(2) / num_bytes[targets].sum().item())
        for kind, pairs in self.probes.items():
            self.accuracy[kind] = exact_share(pairs, self.tokenizer, self.logits_of)
        losses = ", ".join(f"{kind} {loss:.3f} ({bits:.3f} bits/byte)" for kind, (loss, bits) in self.losses.items())
        exact = ", ".join(f"{kind} {share:.1%}" for kind, share in self.accuracy.items())
        tqdm.write(f"step {self.step}, {self.tokens / 1e6:.2f} M tokens, {self.seconds / 60:.1f} min:")
        tqdm.write(f"  held-out loss {losses}; exact answers to held-out questions {exact}")
        for number, layer in enumerate(torch.stack(shares).mean(0)):
            tqdm.write(f"  layer {number} experts' shares in %: " + " ".join(f"{100 * share:.1f}" for share in layer))


def _tokenizer(path: Path, train: Corpus, sampler: DialogueSampler) -> Tokenizer:
    """Return the tokenizer in a file, which is trained first if it is missing."""
    if not path.exists():
        rng = random.Random(0)
        chats = [render_chat(sampler.sample(rng)) for _ in range(TOKENIZER_CHATS)]
        train_tokenizer(train.code + train.prose * PROSE_REPEATS + chats).save(str(path))
    return Tokenizer.from_file(str(path))


def expert_use(router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the balance loss of a layer's router (Switch, eq. 4; 1 when even) and each expert's share of its tokens.

    transformers' own loss adds the layers up first, so that one layer's neglected expert hides behind another's.
    """
    probs = router_logits.float().softmax(-1)  # [num_tokens, num_experts]
    top_k = CONFIG["num_experts_per_tok"]
    share = torch.zeros_like(probs).scatter(1, probs.topk(top_k).indices, 1 / top_k).mean(0)
    return CONFIG["num_experts"] * (share * probs.mean(0)).sum(), share
