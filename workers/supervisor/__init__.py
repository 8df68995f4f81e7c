"""`make up`: one foreground process that starts all processes on this machine, restarts those that die, and stops them.

Read in this order: `settings`, `plan` (what runs, in which order), `supervisor` (the loop), `engine_processes`,
`child`.
"""
