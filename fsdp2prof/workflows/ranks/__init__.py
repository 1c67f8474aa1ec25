"""Work on each rank: read and reduced, here or on a cluster, then merged."""
