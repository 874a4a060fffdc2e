"""Published findings tried again in the playground world."""
