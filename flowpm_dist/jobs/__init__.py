"""What every long job shares: folder, checkpoints, stop, progress, tables."""
