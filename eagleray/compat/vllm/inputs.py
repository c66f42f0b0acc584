"""Prompts, as dicts with the fields of vLLM."""

from eagleray.prompts import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
