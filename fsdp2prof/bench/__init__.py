"""What ``fsdp2prof bench`` runs inside the ranks: it measures and judges nothing."""
