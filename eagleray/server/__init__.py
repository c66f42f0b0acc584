"""HTTP: the OpenAI-compatible routes, tokens in and tokens out, health and metrics.

`app.create_app` makes the ASGI application from a client of the engines; `entry` is the process around it. Knows no
engine and imports no torch.
"""
