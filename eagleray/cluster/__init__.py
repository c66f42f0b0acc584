"""The only place that imports Ray: connecting, placing, spawning, watching.

Ray brings workers to life and notices their death; what engine and workers say to each other goes by our own queue.
"""
