"""The client of the engines: prompts in, texts and tokens out. Used by the API server and by `LLM`."""

from eagleray.client.chat_template import OverBudget, RenderBudget
from eagleray.client.client import Client
from eagleray.client.generation_config import default_sampling
from eagleray.client.mailboxes import Inbox, Outbox
from eagleray.client.open import open_client
from eagleray.client.outputs import CompletionDelta, CompletionOutput, Logprob, RequestDelta, RequestOutput
from eagleray.client.preprocess import MAX_COMPLETIONS, MAX_LOGPROB_TOKEN_IDS, MAX_TIMEOUT_SECONDS, Prompt
from eagleray.client.recovery import RecoveryObserver
from eagleray.client.stream import RequestStream
from eagleray.client.tokenizer import Tokenizer

__all__ = [
    "MAX_COMPLETIONS",
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_TIMEOUT_SECONDS",
    "Client",
    "CompletionDelta",
    "CompletionOutput",
    "Inbox",
    "Logprob",
    "Outbox",
    "OverBudget",
    "Prompt",
    "RecoveryObserver",
    "RenderBudget",
    "RequestDelta",
    "RequestOutput",
    "RequestStream",
    "Tokenizer",
    "default_sampling",
    "open_client",
]
