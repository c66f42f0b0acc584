"""llama.cpp with several requests at once, through the C interface in llama-cpp-python. Used by `measure_offline.py`.

The prompts are computed first, in batches; then a step computes one token of every request. Sampling is greedy.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import llama_cpp
import numpy as np

BATCH_TOKENS = 2048
"""Most tokens of one call of llama.cpp, which computes them in parts of `UBATCH_TOKENS`."""
UBATCH_TOKENS = 512


@llama_cpp.llama_log_callback
def quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


class LlamaEngine:
    """A model and a context sized for the current requests, because sequences share a context in equal parts.

    `options` may have `num_threads`, by default one per core.
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
        """Return the number of tokens that each of `prompts` got.

        If the prompts are the same as in the last call, only their last tokens are computed, as with the prefix caches
        of the other engines.
        """
        self._fit(len(prompts), max(map(len, prompts)) + num_out)
        tokens = self._prefill(prompts)
        for index in range(1, num_out):
            position = [len(prompt) + index - 1 for prompt in prompts]
            tokens = self._step([(seq, position[seq], token, True) for seq, token in enumerate(tokens)])
        return [num_out] * len(prompts)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits, float32 [tokens, vocabulary], of one sequence."""
        self._fit(1, len(tokens))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._cached = []
        found = np.empty((len(tokens), self._vocab_size), np.float32)
        for start in range(0, len(tokens), BATCH_TOKENS):
            part = tokens[start : start + BATCH_TOKENS]
            self._decode([(0, start + index, token, True) for index, token in enumerate(part)])
            for index in range(len(part)):
                found[start + index] = self._logits_of(index)
        return found

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def _fit(self, num_seqs: int, num_tokens: int) -> None:
        """Make sure that the context has at least this size; a new one has an empty cache."""
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
        """Compute the prompts and return the first token of each answer."""
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
        """Compute entries (sequence, position, token, is_sampled); return the likeliest next tokens of the sampled."""
        self._decode(entries)
        tokens = [int(self._logits_of(index).argmax()) for index, entry in enumerate(entries) if entry[3]]
        llama_cpp.llama_synchronize(self._context)
        return tokens

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (seq, position, token, is_sampled) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = seq
            batch.logits[index] = is_sampled
        if (code := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise SystemExit(f"llama_decode failed with code {code}")

    def _logits_of(self, index: int) -> np.ndarray:
        """Return the logits of an entry of the last batch, in llama.cpp's own memory."""
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(logits, (self._vocab_size,))
