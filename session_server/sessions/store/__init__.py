"""Keep sessions on disk, so that what was acknowledged outlives the process."""
