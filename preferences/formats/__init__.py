"""Published formats of preference data: rows to tasks and judgments, and back."""
