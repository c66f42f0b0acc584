"""Prometheus metrics, under the names that vLLM's dashboards use, with the prefix `eagleray:`.

Owned by the API servers, each of which reports the totals of all. Values are passed in: nothing here imports a client
or an engine. There is no global registry.
"""
