"""llama-index with OpenAILike: chat, completion, streams."""

from __future__ import annotations

import asyncio

from checking import MODEL, URL, check, expect, expect_texts, run_checks
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

SETTINGS = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 8, "temperature": 0}
QUESTION = [ChatMessage(role="user", content="What is a list?")]


def llm(**fields):
    return OpenAILike(**(SETTINGS | {"is_chat_model": True, "max_retries": 0} | fields))


@check("chat")
def chat():
    expect_texts([llm().chat(QUESTION).message.content])


@check("chat stream")
def chat_stream():
    parts = list(llm().stream_chat(QUESTION))
    expect("".join(part.delta or "" for part in parts) == parts[-1].message.content, "parts and answer differ")
    expect_texts([parts[-1].message.content])


@check("completion")
def completion():
    expect_texts([llm(is_chat_model=False).complete("def main():").text])


@check("completion stream")
def completion_stream():
    expect_texts(["".join(part.delta or "" for part in llm(is_chat_model=False).stream_complete("def main():"))])


@check("asynchronous chat")
def asynchronous():
    expect_texts([asyncio.run(llm().achat(QUESTION)).message.content])


if __name__ == "__main__":
    run_checks()
