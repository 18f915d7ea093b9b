"""Results on disk: the output folder, snapshots, tables. Importing this is light."""

from flowpm_dist.io.snapshot import Snapshot, SnapshotError, load_snapshot

__all__ = ["Snapshot", "SnapshotError", "load_snapshot"]
