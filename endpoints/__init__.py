"""Calls to other people's HTTP servers, and ports for servers of our own, below every package that needs either."""
