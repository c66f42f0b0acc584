"""Models by their ids and URLs: found in the cache of Hugging Face, or downloaded to it, before an engine starts.

`prepare.prepare_model` pins the model of a configuration to a commit; it is called once, by the program that starts the
engines. `prepare.fetch_model` is called on every node that reads the weights. `locate` has the directories of a
configuration that was prepared, and reads no network.
"""
