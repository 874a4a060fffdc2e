"""`research.chaos`: a job under random faults must end with the same bits as an undisturbed run."""
