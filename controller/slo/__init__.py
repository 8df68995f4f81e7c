"""SLOs: classes, the priority mapping, attainment and goodput."""
