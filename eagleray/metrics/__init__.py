"""What Prometheus is told, under the names that vLLM's dashboards know, with the prefix `eagleray:`.

Belongs to the API servers, any of which tells the totals of all: values are passed in, nothing here knows a client or
an engine. No global registry.
"""
