"""Worker groups, placement and failures, on Ray. No other package imports ray."""
