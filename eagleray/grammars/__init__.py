"""Grammars that constrain completions: compiled by llguidance or xgrammar, followed token by token.

A client compiles a grammar to refuse a wrong one; the worker that samples compiles it again and has a matcher for each
row. The state of a matcher is a function of the tokens that it has accepted, so it is rebuilt by replaying them.
"""
