"""Requests of weight transfers."""
