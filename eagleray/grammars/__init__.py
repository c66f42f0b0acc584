"""Grammars that constrain completions: compiled by llguidance, followed token by token.

The worker that samples compiles a grammar before the first request with it runs, and has a matcher for each row. The
state of a matcher is a function of the tokens that it has accepted, so it is rebuilt by replaying them.
"""
