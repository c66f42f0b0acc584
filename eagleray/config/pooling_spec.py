"""Description of a pooling model, and the error messages about its kind."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingMethod = Literal["last", "mean", "cls"]
Activation = Literal["none", "normalize", "softmax", "sigmoid"]

GENERATING = "ForCausalLM"
CLASSIFYING = "ForSequenceClassification"
BARE = "Model"
"""Ends of architectures: with the head that predicts tokens, with a head of labels, without a head."""

POOLS_ONLY = (
    "the model is served for pooling and does not generate: ask for embeddings or scores, or start it with `--runner "
    "generate`, if it has a head that predicts tokens"
)
GENERATES_ONLY = (
    "the model is served to generate and does not return embeddings or scores: start it with `--runner pooling`"
)
"""Reasons why a request is for another kind of model."""


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Way from the hidden states of a prompt to the vector that a pooling model returns."""

    kind: Literal["embed", "classify"]
    method: PoolingMethod
    """Hidden states that are pooled: that of the last token, the mean of all, or that of the first token."""
    activation: Activation
    """Function of the vector that is applied unless a request turns it off."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in their order, of a classifier."""
    label_tokens: tuple[int, ...] = ()
    """Tokens whose rows of the head that predicts tokens are the head of the labels; empty: it has a head of its own.
    With two tokens and one label it is the second row minus the first: the label's probability is then that of the
    second token among the two."""
    is_matryoshka: bool = False
    """Whether the first features of an embedding are an embedding themselves."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The only numbers of features that such an embedding may be cut to; empty: any."""

    @property
    def needs_all_tokens(self) -> bool:
        """Whether hidden states are needed that a prefix cache cannot replace."""
        return self.method != "last"


def too_long_to_pool(cause: str, max_model_len: int) -> str:
    """Return the error message for a prompt of a pooling model. `cause` says why it is too long."""
    return (
        f"This model's maximum context length is {max_model_len} tokens. The prompt is too long: {cause}; shorten it "
        f"to at most {max_model_len}."
    )
