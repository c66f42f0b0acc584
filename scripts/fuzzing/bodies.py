"""Attacks by well-formed requests: too many sequences, texts that are too long, lists without end, absurd numbers."""

from __future__ import annotations

import asyncio
import gzip
import random
import time
from typing import Any

from fuzzing.arena import Arena, attack
from fuzzing.schema import BodyMaker
from fuzzing.values import Raw, encode, nested
from fuzzing.wire import exchange, get, request

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

BODY_BYTES = 32 * 2**20
"""The default of --max-request-bytes."""

ROOM = 4096
"""Bytes of a body that are reserved for everything except the text."""

WITHOUT_END = "1" + "0" * 400
NUM_RANDOM = 4
"""Random bodies in flight at a time."""

REFUSED = (400, 413, 429)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@attack("bodies", "4,000 prompts with n=1024 in 20 KB: 4 million sequences")
async def sequences(arena: Arena) -> None:
    body = {"prompt": ["x"] * 4000, "max_tokens": 1, "n": 1024, "temperature": 1}
    await arena.post(COMPLETIONS, body, "4,000 prompts, n=1024", want=(400, 429))


@attack("bodies", "the same with token ids as prompts, with best_of, and by /inference/v1/generate with n=10^6")
async def sequences_elsewhere(arena: Arena) -> None:
    ids = {"prompt": [[5, 6]] * 4000, "max_tokens": 1, "n": 1024, "temperature": 1}
    await arena.post(COMPLETIONS, ids, "4,000 prompts of ids, n=1024", want=(400, 429))
    sampling = {"n": 10**6, "max_tokens": 1, "temperature": 1}
    generate = {"token_ids": [5, 6], "sampling_params": sampling}
    await arena.post(GENERATE, generate, "generate, n=10^6", want=(400, 429))
    chat = {"messages": user("x"), "n": 10**6, "max_tokens": 1, "temperature": 1}
    await arena.post(CHAT, chat, "chat, n=10^6", want=(400, 429))


@attack("bodies", "200 requests at once of 64 prompts with n=64 each")
async def sequences_in_flight(arena: Arena) -> None:
    body = {"prompt": ["x"] * 64, "max_tokens": 2, "n": 64, "temperature": 1, "timeout": 5}
    await asyncio.gather(*(arena.post(COMPLETIONS, body, f"64 prompts, n=64 (#{i})") for i in range(200)))


def _long(unit: str) -> str:
    return unit * ((BODY_BYTES - ROOM) // len(encode(unit).strip(b'"')))


async def _everywhere(arena: Arena, text: str, what: str) -> None:
    """Send a text that can't fit to every endpoint that takes one."""
    await arena.post(COMPLETIONS, {"prompt": text, "max_tokens": 1}, f"{what} to {COMPLETIONS}", want=REFUSED)
    await arena.post(TOKENIZE, {"prompt": text}, f"{what} to {TOKENIZE}", want=(200, *REFUSED))
    await arena.post(CHAT, {"messages": user(text), "max_tokens": 1}, f"{what} to {CHAT}", want=REFUSED)


@attack("bodies", "32 MB of one text, to each endpoint that takes a text")
async def long_text(arena: Arena) -> None:
    await _everywhere(arena, _long("the river walks "), "32 MB of text")


@attack("bodies", "24 MB of emoji, as UTF-8 and as escapes")
async def emoji(arena: Arena) -> None:
    text = "👩🏽‍🚀🎉" * (24 * 2**20 // len("👩🏽‍🚀🎉".encode()))
    for path in (COMPLETIONS, TOKENIZE):
        body = f'{{"prompt":"{text}"}}'.encode()
        await arena.post(path, body, f"24 MB of emoji to {path}", want=(200, *REFUSED))
    await _everywhere(arena, _long("🎉"), "32 MB of escaped emoji")


@attack("bodies", "30 MB of spaces, which make a tokenizer of regular expressions panic")
async def spaces(arena: Arena) -> None:
    await _everywhere(arena, " " * (30 * 2**20), "30 MB of spaces")


@attack("bodies", "30 MB of line feeds, of letters without a space, of combining marks")
async def other_long_texts(arena: Arena) -> None:
    for what, unit in (("line feeds", "\n"), ("letters", "a"), ("combining marks", "\u0301"), ("digits", "7")):
        text = _long(unit)
        await arena.post(TOKENIZE, {"prompt": text}, f"30 MB of {what}", want=(200, *REFUSED))


@attack("bodies", "nine bodies of 32 MB of text in a row, and nine at once")
async def long_texts_in_a_row(arena: Arena) -> None:
    body = encode({"prompt": _long("seven green stones "), "max_tokens": 1})
    for number in range(9):
        await arena.post(COMPLETIONS, body, f"32 MB of text (#{number})", want=REFUSED)
    want = (*REFUSED, 503)  # together they are more than the server holds
    at_once = (arena.post(COMPLETIONS, body, f"32 MB of text (#{i} of 9 at once)", want=want) for i in range(9))
    await asyncio.gather(*at_once)


@attack("bodies", "32 MB of text, sent by clients that leave at once")
async def long_texts_abandoned(arena: Arena) -> None:
    payload = request("POST", TOKENIZE, encode({"prompt": _long("under cold light ")}))
    for _ in range(6):
        _, writer = await asyncio.open_connection(*arena.address)
        writer.write(payload)
        await writer.drain()
        writer.transport.abort()
        await asyncio.sleep(0.2)


@attack("bodies", "4,000 prompts of 8,000 characters: 32 MB in texts that each fit")
async def many_fitting_texts(arena: Arena) -> None:
    texts = [f"{i} " + "the river " * 790 for i in range(4000)]
    await arena.post(COMPLETIONS, {"prompt": texts, "max_tokens": 1}, "4,000 texts of 8,000 characters", want=REFUSED)
    few = {"prompt": texts[:100], "max_tokens": 1, "timeout": 20}
    await arena.post(COMPLETIONS, few, "100 texts of 8,000 characters", want=(200, 400, 429, 504))


@attack("bodies", "300,000 chat messages, and one message of a million parts")
async def chat_messages(arena: Arena) -> None:
    messages = [{"role": "user", "content": "hello there"}] * 300_000
    await arena.post(CHAT, {"messages": messages, "max_tokens": 1}, "300,000 messages", want=REFUSED)
    await arena.post(TOKENIZE, {"messages": messages}, "300,000 messages to /tokenize", want=(200, *REFUSED))
    parts = [{"type": "text", "text": "a"}] * 1_000_000
    await arena.post(CHAT, {"messages": user(parts), "max_tokens": 1}, "a message of a million parts", want=REFUSED)
    empty = [{"role": "user", "content": ""}] * 900_000
    await arena.post(CHAT, {"messages": empty, "max_tokens": 1}, "900,000 empty messages", want=REFUSED)


@attack("bodies", "100,000 stop strings, in each endpoint, then 100,000 long ones")
async def stop_strings(arena: Arena) -> None:
    stops = [f"stop{i}" for i in range(100_000)]
    more = {"max_tokens": 300, "ignore_eos": True, "stop": stops}
    await arena.post(COMPLETIONS, {"prompt": "Return", **more}, "100,000 stop strings", want=(400,))
    await arena.post(CHAT, {"messages": user("x"), **more}, "100,000 stop strings in a chat", want=(400,))
    generate = {"token_ids": [5, 6, 7], "sampling_params": more}
    await arena.post(GENERATE, generate, "100,000 stop strings to generate", want=(400,))
    long = {"prompt": "Return", "max_tokens": 300, "ignore_eos": True, "stop": ["x" * 20_000_000]}
    await arena.post(COMPLETIONS, long, "a stop string of 20 MB", want=(200, 400))


@attack("bodies", "100,000 bad words, and one of 20 MB")
async def bad_words(arena: Arena) -> None:
    words = [f"word{i}" for i in range(100_000)]
    more = {"max_tokens": 300, "ignore_eos": True}
    await arena.post(COMPLETIONS, {"prompt": "x", "bad_words": words, **more}, "100,000 bad words", want=(400,))
    sampling = {"bad_words": words, **more}
    await arena.post(GENERATE, {"token_ids": [5], "sampling_params": sampling}, "the same to generate", want=(400,))
    long = {"prompt": "x", "bad_words": ["the river " * 2_000_000], **more}
    await arena.post(COMPLETIONS, long, "a bad word of 20 MB", want=(200, 400))


@attack("bodies", "lists of a million token ids: stop, allowed, log-probabilities, bias, prompt, detokenize")
async def token_lists(arena: Arena) -> None:
    ids = [i % 4096 for i in range(1_000_000)]
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, name: ids}
        await arena.post(COMPLETIONS, body, f"a million {name}", want=(200, 400))
        generate = {"token_ids": [5], "sampling_params": {"max_tokens": 200, "ignore_eos": True, name: ids[:100_000]}}
        await arena.post(GENERATE, generate, f"100,000 {name} to generate", want=(200, 400))
    bias = {"prompt": "x", "max_tokens": 20, "logit_bias": {str(i): 1.0 for i in range(500_000)}}
    await arena.post(COMPLETIONS, bias, "a bias of 500,000 tokens", want=(200, 400))
    await arena.post(COMPLETIONS, {"prompt": ids * 5, "max_tokens": 1}, "a prompt of 5 million ids", want=(400,))
    await arena.post(DETOKENIZE, {"tokens": ids * 5}, "5 million ids to detokenize", want=(200, 400))


@attack("bodies", "max_tokens of 401 digits with n=200, and every other number of the schema with as many digits")
async def numbers_without_end(arena: Arena) -> None:
    body = {"prompt": "x", "n": 200, "temperature": 1, "ignore_eos": True, "max_tokens": Raw(WITHOUT_END)}
    await arena.post(COMPLETIONS, body, "max_tokens of 401 digits, n=200", want=(400,))
    maker = await _maker(arena)
    for path, sane in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": user("x")})):
        for name in maker.numbers(path):
            for digits in (WITHOUT_END, "-" + WITHOUT_END, "1" + "0" * 5000, str(2**63), str(2**64), "1e400", "1e300"):
                body = {"max_tokens": 2, "ignore_eos": True, **sane, name: Raw(digits)}
                await arena.post(path, body, f"{name}={digits[:20]}… of {len(digits)} digits to {path}")


@attack("bodies", "sums of budgets: the largest max_tokens that are taken, many at a time")
async def sums_of_budgets(arena: Arena) -> None:
    for value in (2**31 - 1, 2**53, 2**62, 2**63 - 1):
        body = {"prompt": "x", "n": 20, "temperature": 1, "max_tokens": value, "timeout": 1}
        await asyncio.gather(*(arena.post(COMPLETIONS, body, f"max_tokens={value} (#{i})") for i in range(4)))
    metrics = await get(arena.address, "/metrics")
    arena.expect(metrics.status == 200, f"/metrics answered {metrics.status}")
    endless = [line for line in metrics.body.decode().splitlines() if line.endswith(("+Inf", " inf", " Inf", "NaN"))]
    arena.expect(not endless, f"metrics that are not finite: {endless[:5]}")


@attack("bodies", "subnormal, tiny and huge penalties, temperatures and shares")
async def odd_floats(arena: Arena) -> None:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_p", "min_p", "timeout")
    values = ("5e-324", "1e-310", "1e-45", "1e-38", "1e38", "1e39", "1e308", "1e400", "NaN", "Infinity", "-0.0", "1e-7")
    for name in names:
        for value in values:
            if (name, value) in {("timeout", "-0.0")}:
                continue
            body = {"prompt": "Return the", "max_tokens": 4, "temperature": 1, "seed": 1, name: Raw(value)}
            await arena.post(COMPLETIONS, body, f"{name}={value}")
    for value in ("5e-324", "1e-39", "3e38", "-1e308"):
        bias = {"prompt": "x", "max_tokens": 4, "temperature": 1, "logit_bias": {"5": Raw(value), "6": Raw(value)}}
        await arena.post(COMPLETIONS, bias, f"logit_bias of {value}")


@attack("bodies", "brackets nested 100,000 deep, everywhere")
async def nesting(arena: Arena) -> None:
    for depth in (500, 1000, 5000, 100_000, 5_000_000):
        for deep in (nested(depth, "[", "]"), nested(depth, '{"a":', "}")):
            for name, path in (
                ("prompt", COMPLETIONS),
                ("logit_bias", COMPLETIONS),
                ("chat_template_kwargs", TOKENIZE),
            ):
                body = {"messages": user("x")} if path == TOKENIZE else {"prompt": "x"}
                what = f"{name} nested {depth} deep ({deep[:5]})"
                await arena.post(path, {**body, name: deep}, what, want=(200, *REFUSED))


@attack("bodies", "lone surrogates and NUL in every text of the schema")
async def surrogates(arena: Arena) -> None:
    maker = await _maker(arena)
    for text in ("\ud800", "a\udfffb", "\x00", "\ufffe"):
        for path in maker.operations:
            for name in maker.texts(path):
                sane: dict[str, Any] = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": user("x")}}.get(path, {})
                sane = {"token_ids": [5], "sampling_params": {}} if path == GENERATE else sane
                await arena.post(path, {**sane, name: text}, f"{name}={text!r} to {path}")
    for stream in (False, True):
        body = {"messages": user("\ud83d"), "max_tokens": 3, "stream": stream}
        await arena.post(CHAT, body, f"a lone surrogate as a message, stream={stream}")


@attack("bodies", "prompts times n times log-probabilities: the largest answers that are allowed")
async def products(arena: Arena) -> None:
    cases: list[dict[str, Any]] = [
        {"prompt": ["x"] * 16, "n": 16, "logprobs": 20, "max_tokens": 100},
        {"prompt": ["the river walks " * 100] * 20, "n": 2, "prompt_logprobs": 20, "max_tokens": 1},
        {"prompt": ["the river walks " * 100] * 20, "echo": True, "logprobs": 20, "max_tokens": 0},
        {"prompt": ["x"] * 30, "n": 4, "logprob_token_ids": list(range(1000)), "max_tokens": 100},
    ]
    for body in cases:
        body = {"temperature": 1, "ignore_eos": True, "timeout": 30, **body}
        what = ", ".join(f"{name}={str(value)[:20]}" for name, value in body.items())
        await arena.post(COMPLETIONS, body, what, seconds=45)


@attack("bodies", "a whole answer of 64 choices with 20 log-probabilities each")
async def large_answers(arena: Arena) -> None:
    body = {"prompt": "Return", "n": 64, "logprobs": 20, "max_tokens": 400, "ignore_eos": True, "temperature": 1}
    await arena.post(COMPLETIONS, body, "n=64, logprobs=20", want=(200, 400, 429))
    chat = {"messages": user("x"), "n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 400, "temperature": 1}
    await arena.post(CHAT, {**chat, "ignore_eos": True}, "the same as a chat", want=(200, 400, 429))
    await arena.post(COMPLETIONS, {**body, "stream": True}, "the same as a stream", want=(200, 400, 429))


@attack("bodies", "a chat template's arguments that loop, and huge arguments")
async def template_arguments(arena: Arena) -> None:
    for what, value in (
        ("500,000 entries", {str(i): i for i in range(500_000)}),
        ("a text of 20 MB", {"tools": "x" * 20_000_000}),
        ("what the template sets itself", {"messages": [], "add_generation_prompt": 5, "bos_token": ["x"]}),
        ("names of Python", {"self": 1, "loop": 2, "range": 3, "namespace": 4, "raise_exception": 5}),
    ):
        body = {"messages": user("x"), "max_tokens": 1, "chat_template_kwargs": value}
        await arena.post(CHAT, body, f"chat_template_kwargs with {what}")


@attack("bodies", "a million unknown fields, the same field a million times, and bodies that are no JSON")
async def odd_json(arena: Arena) -> None:
    wide = b"{" + b",".join(b'"f%d":1' % i for i in range(1_000_000)) + b',"prompt":"x"}'
    await arena.post(COMPLETIONS, wide, "a million unknown fields", want=(200, *REFUSED))
    again = b'{"prompt":"x","max_tokens":1' + b',"seed":1' * 1_000_000 + b"}"
    await arena.post(COMPLETIONS, again, "a field that is there a million times", want=(200, *REFUSED))
    for what, body in (
        ("nothing", b""),
        ("null", b"null"),
        ("a list", b"[]"),
        ("a byte order mark", b'\xef\xbb\xbf{"prompt":"x"}'),
        ("Latin-1", b'{"prompt":"\xe9"}'),
        ("UTF-16", '{"prompt":"x"}'.encode("utf-16")),
        ("half of it", b'{"prompt":"x'),
        ("two values", b'{"prompt":"x"}{"prompt":"y"}'),
        ("gzip", b"\x1f\x8b\x08\x00" + b"\x00" * 100),
        ("32 MB of NUL", b"\x00" * (BODY_BYTES - 1)),
        ("33 MB", b" " * (BODY_BYTES + 1)),
    ):
        await arena.post(COMPLETIONS, body, f"a body that is {what}", want=REFUSED)
    for path in ("/tokenize", "/detokenize", CHAT, GENERATE):
        await arena.post(path, b"[" * 1000, f"unclosed brackets to {path}", want=REFUSED)


@attack("bodies", "bodies that inflate to 32 MB and more, forty at a time, and gzip of many members")
async def compressed(arena: Arena) -> None:
    text = encode({"prompt": "x", "max_tokens": 1})
    bombs = {
        "a bomb of 256 MB": (gzip.compress(b" " * 2**28, 9), (413,)),
        "as much as is allowed": (gzip.compress(text + b" " * (BODY_BYTES - len(text)), 1), (200, 429)),
        "50,000 members": (gzip.compress(b"") * 50_000, REFUSED),
        "one member and garbage": (gzip.compress(text) + b"x" * 2**20, REFUSED),
        "half of its data": (gzip.compress(text)[:-9], REFUSED),
    }
    headers = {"Content-Encoding": "gzip"}
    for what, (body, want) in bombs.items():
        posts = (arena.post(COMPLETIONS, body, f"{what} (#{i})", want=want, headers=headers) for i in range(40))
        await asyncio.gather(*posts)
    await arena.post(COMPLETIONS, text, "a body as brotli", want=(415,), headers={"Content-Encoding": "br"})


@attack("bodies", "random bodies made from /openapi.json", is_random=True)
async def random_bodies(arena: Arena) -> None:
    maker = await _maker(arena)
    deadline = time.monotonic() + arena.seconds
    numbers = iter(range(10**9)) if arena.case is None else iter([arena.case])

    async def work() -> None:
        for number in numbers:
            path, body, what = maker.make(arena.rng(f"bodies/{number}"))
            await arena.post(path, body, f"case {number}: {path} with {what}")
            if time.monotonic() > deadline:
                return

    await asyncio.gather(*(work() for _ in range(NUM_RANDOM)))


@attack("bodies", "random headers of a request, with hostile values", is_random=True)
async def random_headers(arena: Arena) -> None:
    deadline = time.monotonic() + min(arena.seconds, 5.0)
    body = encode({"prompt": "x", "max_tokens": 1})
    number = 0
    while time.monotonic() < deadline:
        rng = arena.rng(f"headers/{number}")
        name = rng.choice(("X-data-parallel-rank", "X-Session-ID", "X-Request-Id", "Authorization", "Content-Type"))
        value = _header_value(rng)
        reply = await exchange(arena.address, [request("POST", COMPLETIONS, body, {name: value})])
        arena.judge(reply, f"case {number}: {name}: {value[:60]!r}")
        number += 1


def _header_value(rng: random.Random) -> str:
    return (
        rng.choice(
            (
                "",
                "-1",
                "0" * 5000,
                "9" * 400,
                "1e9",
                "０",
                "\xff\xfe",
                "a" * 30_000,
                "application/msgpack",
                "text/plain; charset=utf-7",
                "Bearer " + "x" * 1000,
                "\t\t",
                "NaN",
                "0, 0",
            )
        )
        .encode("utf-8")
        .decode("latin-1")
    )


async def _maker(arena: Arena) -> BodyMaker:
    reply = await get(arena.address, "/openapi.json")
    return BodyMaker(reply.json())
