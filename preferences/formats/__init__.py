"""Published formats of preference data: converting rows to tasks and judgments, and back."""
