"""Files in and out: snapshots, volumes, white noise, figures. Importing this is light."""

from flowpm_dist.io.snapshot import Snapshot, SnapshotError, load_snapshot

__all__ = ["Snapshot", "SnapshotError", "load_snapshot"]
