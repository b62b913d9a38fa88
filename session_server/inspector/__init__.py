"""What a checkpoint is, and what serving it takes, before it is served."""
