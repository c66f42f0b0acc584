"""The routes of Anthropic's API, /v1/messages and its count of tokens: bodies, conversation, answers and errors."""
