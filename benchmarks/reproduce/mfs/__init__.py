"""MFS (Figures 10 to 14): flow policies under layered prefills of disaggregated clusters."""
