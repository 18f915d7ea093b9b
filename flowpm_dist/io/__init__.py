"""Reading and writing files: snapshots, volumes, white noise, figures. It imports fast."""

from flowpm_dist.io.light_cone import LightConeMaps, load_light_cone, read_light_cone
from flowpm_dist.io.samples import Samples
from flowpm_dist.io.snapshot import Snapshot, SnapshotError, load_snapshot

__all__ = [
    "LightConeMaps",
    "Samples",
    "Snapshot",
    "SnapshotError",
    "load_light_cone",
    "load_snapshot",
    "read_light_cone",
]
