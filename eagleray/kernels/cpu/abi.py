"""The C interface of `native/`: its structs, field by field, and the types of its functions.

Integers are int64 unless said otherwise, rows are named by the number of their buffer.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p

EMBED, NORMALIZE, MULTIPLY, ATTEND, MIX, ADD, CLEAR, ROUND = range(8)
ENDING_STORE, ENDING_ADD, ENDING_SILU, ENDING_CLAMPED = range(4)
SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")
"""A name's number is its place."""


class AttentionShape(Structure):
    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("sinks", c_void_p),
    )


class Embed(Structure):
    _fields_ = (
        ("out", c_int64),
        ("values", c_void_p),
        ("is_packed", c_int64),
        ("size", c_int64),
        ("first", c_int64),
        ("num_own", c_int64),
    )


class Normalize(Structure):
    _fields_ = (
        ("x", c_int64),
        ("out", c_int64),
        ("size", c_int64),
        ("weight", c_void_p),
        ("eps", c_float),
    )


class Clamp(Structure):
    _fields_ = (("alpha", c_float), ("limit", c_float))


class Multiply(Structure):
    _fields_ = (
        ("x", c_int64),
        ("out", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("ending", c_int64),
        ("clamp", Clamp),
        ("weight", c_void_p),
        ("bias", c_void_p),
    )


class Attend(Structure):
    _fields_ = (
        ("qkv", c_int64),
        ("queries", c_int64),
        ("out", c_int64),
        ("shape", AttentionShape),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("cache", c_void_p),
    )


class Mixture(Structure):
    _fields_ = (
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("scoring", c_int64),
        ("correction_bias", c_void_p),
        ("num_groups", c_int64),
        ("top_groups", c_int64),
        ("group_score", c_int64),
        ("renormalize", c_int64),
        ("renormalize_eps", c_float),
        ("scale", c_float),
        ("round_weights", c_int64),
    )


class Experts(Structure):
    _fields_ = (
        ("num_slots", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("ending", c_int32),
        ("clamp", Clamp),
    )


class SlotMap(Structure):
    _fields_ = (("table", c_void_p), ("num_copies", c_void_p), ("max_copies", c_int64))


class Trace(Structure):
    _fields_ = (("ids", c_void_p), ("stride", c_int64), ("is_wide", c_int64))


class Mix(Structure):
    _fields_ = (
        ("x", c_int64),
        ("scores", c_int64),
        ("hidden", c_int64),
        ("mixture", Mixture),
        ("experts", Experts),
        ("map", SlotMap),
        ("counts", c_void_p),
        ("trace", Trace),
    )


class RoutedRows(Structure):
    _fields_ = (
        ("scores", c_void_p),
        ("scores_stride", c_int64),
        ("hidden", c_void_p),
        ("hidden_stride", c_int64),
        ("ids", c_void_p),
        ("trace", Trace),
    )


class Product(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("x_rows", c_void_p),
        ("num_rows", c_int64),
        ("weight", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("bias", c_void_p),
        ("ending", c_int32),
        ("clamp", Clamp),
        ("y", c_void_p),
        ("y_stride", c_int64),
    )


class RowsToRows(Structure):
    _fields_ = (("x", c_int64), ("out", c_int64), ("size", c_int64))


class Step(Structure):
    _fields_ = (("operation", c_int64), ("what", c_void_p))


class RowBuffer(Structure):
    _fields_ = (("memory", c_void_p), ("stride", c_int64))


class CBatch(Structure):
    _fields_ = (
        ("num_rows", c_int64),
        ("num_tokens", c_int64),
        ("starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("token_ids", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("attention_scratch", c_void_p),
        ("expert_scratch", c_void_p),
        ("expert_tokens", c_int64),
        ("expert_ids", c_void_p),
    )


def declare(library: ctypes.CDLL) -> None:
    """Give the library's functions their types. Harmless when repeated."""
    functions = {
        "er_packed_size": (c_int64, [c_int64, c_int64, c_int]),
        "er_pack": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int, c_int]),
        "er_pack_gate_up": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int, c_int]),
        "er_multiply": (None, [POINTER(Product), c_int64, c_int, c_int]),
        "er_ranking_scratch_size": (c_int64, [c_int64, c_int64]),
        "er_argmax": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int]),
        "er_top_k": (None, [c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int]),
        "er_run": (None, [c_int, POINTER(Step), c_int64, POINTER(RowBuffer), POINTER(CBatch), c_int]),
        "er_attention_scratch": (c_int64, [POINTER(AttentionShape), c_int64, c_int]),
        "er_route": (None, [POINTER(Mixture), c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int, c_int]),
        "er_experts_scratch_size": (c_int64, [POINTER(Experts), c_int64, c_int64, c_int]),
        "er_compute_experts": (
            None,
            [
                *(POINTER(Mixture), POINTER(Experts), POINTER(SlotMap), c_void_p, c_int64, c_int64),
                *(POINTER(RoutedRows), c_void_p, c_void_p, c_int64, c_int, c_int),
            ],
        ),
        "er_compute_pairs": (
            None,
            [
                *(POINTER(Experts), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p),
                *(c_void_p, c_int64, c_int, c_int),
            ],
        ),
        "er_sum_pairs": (
            None,
            [
                *(POINTER(Experts), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
                *(c_void_p, c_int64, c_int, c_int),
            ],
        ),
        "er_group": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
        "er_combine": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
