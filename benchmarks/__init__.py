"""What Heed is measured against: one module a question, each a command that writes its table."""
