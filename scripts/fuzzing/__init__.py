"""Attacks on a server, and the canary that another client would be: the parts of scripts/fuzz.py."""
