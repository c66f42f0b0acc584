"""Packages for programs that were written for another engine."""
