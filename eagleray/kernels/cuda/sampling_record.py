"""Layout of the sampling parameters of a row in the memory of a device.

The memory is a vector of int32 words. It begins with a record of each row; behind the records are lists of token ids,
to which the records point. Numbers of 64 bits are two words, the low one first.
"""

from __future__ import annotations

from enum import IntEnum


class RecordField(IntEnum):
    """Index of a parameter's first word in the record of a row. A list of token ids is an index into the memory, and
    a count."""

    TEMPERATURE = 0
    """float32; 0 for a greedy row."""
    TOP_K = 1
    """The size of the vocabulary if top_k does not restrict the row."""
    MIN_WEIGHT = 2
    """int64: the least weight that min_p keeps, at most `ONE`."""
    TOP_P = 4
    """float64"""
    STREAM = 6
    """uint64: the random stream."""
    REPETITION = 8
    """float32, like the other two penalties."""
    FREQUENCY = 9
    PRESENCE = 10
    COUNTS = 11
    """The row of the table of token counts, -1 without penalties."""
    ALLOWED = 12
    """Index of a bit for each token of the vocabulary, -1 if every token is allowed."""
    SUPPRESSED = 13
    NUM_SUPPRESSED = 14
    FREE_FROM = 15
    """The first position at which no token is suppressed."""
    BIAS = 16
    """Token ids, then as many float32."""
    NUM_BIASES = 17
    BAD_WORDS = 18
    """The ring of the tokens generated last, [length of the longest prefix], in which a token is at its position modulo
    the length; then the sequences, [count, length of the longest prefix + 1], aligned at their ends."""
    NUM_BAD_WORDS = 19
    PREFIX_LENGTH = 20
    REPORTED = 21
    NUM_REPORTED = 22
    SCALE = 23
    """float32: the temperature that reported logits are divided by; 1 for a greedy row."""
    FORCED = 24
    """Token ids that are generated whatever is drawn."""
    NUM_FORCED = 25
    FORCED_FROM = 26
    """The position of the first forced token."""


RECORD_WORDS = 28
"""A multiple of 4, so that every record begins at a multiple of 16 bytes."""

NO_TOKEN = -1
"""Stands in the ring for a token that was not generated."""
ANY_TOKEN = -2
"""Stands in a sequence for a token of a prefix that is shorter than the longest one: equal to every token."""

IN_PROMPT = 1 << 30
"""Bit of a token's count that says whether the prompt has the token; the lower bits count generated tokens."""

ONE = 2**40
"""Weight of the likeliest token in a draw: 2**22 of them do not overflow."""
