"""The label store and the door through which every labeler, person or script, enters. No torch."""
