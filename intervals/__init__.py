"""Estimates with intervals, and the resampling behind them. No torch."""
