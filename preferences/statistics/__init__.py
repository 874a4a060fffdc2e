"""Statistics of labels: agreement, alpha, accuracy, labelers' habits, each with its interval."""
