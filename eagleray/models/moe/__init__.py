"""Mixture-of-experts layers: the router and the experts."""
