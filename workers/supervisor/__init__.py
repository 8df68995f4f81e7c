"""`make up`: one foreground process that starts everything on this machine, restarts what dies and stops it all.

Read `settings`, `plan` (what runs, in which order), `supervisor` (the loop), `engines` (the wish folder), `child`.
"""
