"""The client of the engines: prompts in, texts and tokens out. Used by the API server and by `LLM`."""
