"""Answers of chat models, split into reasoning, content and tool calls.

A model writes all of them as one text, in the format that it was trained with. A `ToolFormat` or `ReasoningFormat`
knows one such format; `Splitter`s take the text in pieces, as it is generated.
"""
