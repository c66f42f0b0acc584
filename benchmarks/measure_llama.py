"""llama.cpp with several requests at once, by the C interface in llama-cpp-python. Used by `measure_offline.py`.

The prompts go in first, in batches; then a step computes one token of every request. Greedy.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import llama_cpp
import numpy as np

BATCH_TOKENS = 2048
"""What llama.cpp takes at once; it computes them in parts of `UBATCH_TOKENS`."""
UBATCH_TOKENS = 512


@llama_cpp.llama_log_callback
def quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


class LlamaEngine:
    """A model, and a context as large as the requests at hand: sequences share a context in equal parts.

    `options`: `num_threads`, by default one for each core.
    """

    def __init__(self, gguf: str, options: dict[str, Any]) -> None:
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._num_threads = options.get("num_threads") or len(os.sched_getaffinity(0))
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(gguf.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {gguf}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._context_shape = (0, 0)
        self._cached: list[list[int]] = []
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._fit(1, 64)

    def generate(self, prompts: list[list[int]], num_out: int) -> list[int]:
        """How many tokens each of `prompts` got. Of prompts that are those of the last call, only the ends are
        computed: what a prefix cache does for the others."""
        self._fit(len(prompts), max(map(len, prompts)) + num_out)
        tokens = self._prefill(prompts)
        for index in range(1, num_out):
            position = [len(prompt) + index - 1 for prompt in prompts]
            tokens = self._step([(seq, position[seq], token, True) for seq, token in enumerate(tokens)])
        return [num_out] * len(prompts)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def _fit(self, num_seqs: int, num_tokens: int) -> None:
        """A context of at least this size; its cache is empty if it is a new one."""
        if self._context_shape[0] == num_seqs and self._context_shape[1] >= num_tokens:
            return
        if self._context:
            llama_cpp.llama_free(self._context)
        params = llama_cpp.llama_context_default_params()
        num_tokens = -(-num_tokens // 256) * 256
        params.n_ctx = num_seqs * num_tokens
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH_TOKENS, UBATCH_TOKENS, num_seqs
        params.n_threads = params.n_threads_batch = self._num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._context_shape = (num_seqs, num_tokens)
        self._cached = []

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each."""
        memory = llama_cpp.llama_get_memory(self._context)
        if prompts == self._cached:
            for seq, prompt in enumerate(prompts):
                llama_cpp.llama_memory_seq_rm(memory, seq, len(prompt) - 1, -1)
            return self._step([(seq, len(prompt) - 1, prompt[-1], True) for seq, prompt in enumerate(prompts)])
        llama_cpp.llama_memory_clear(memory, True)
        self._cached = prompts
        entries = [
            (seq, position, token, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens: list[int] = []
        for start in range(0, len(entries), BATCH_TOKENS):
            tokens += self._step(entries[start : start + BATCH_TOKENS])
        return tokens

    def _step(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (sequence, position, token, whether the next one is wanted); the likeliest next tokens."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (seq, position, token, wanted) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = seq
            batch.logits[index] = wanted
        if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise SystemExit(f"llama_decode failed with code {code}")
        tokens = []
        for index, (_, _, _, wanted) in enumerate(entries):
            if wanted:
                logits = llama_cpp.llama_get_logits_ith(self._context, index)
                tokens.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
        llama_cpp.llama_synchronize(self._context)
        return tokens
