"""What was promised and whether it was kept: classes, priority mapping, attainment, goodput."""
