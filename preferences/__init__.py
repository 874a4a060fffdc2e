"""The label store: tasks, leases, judgments, accounts, and statistics of labels. No torch."""
