"""Prompts to tokens and tokens to text: tokenizer, chat template, incremental decoding, stop strings."""
