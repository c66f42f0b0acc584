"""The route /v1/responses of OpenAI's API: bodies, the conversation in them, answers and events.

`openai/responses.py` is another file: it has the answers of /v1/completions and /v1/chat/completions.
"""
