"""Calls to other people's HTTP servers, below every package that makes them."""
