"""Ray: connecting to a cluster, placing, creating and monitoring actors. No other package imports Ray, except
`executor.ray_graph`.

Ray starts workers and reports their exit; the messages between an engine and its workers travel over a message queue
of our own.
"""
