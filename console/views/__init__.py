"""Pages: one family of pages a file. Views translate; selectors read and services write.

Here: the overview, scaling, experiments and the audit. `traffic`: requests, the queue, lengths and flows. `fleet`:
instances and launch templates. `configuration`: SLO classes and priority mappings. `accounts`: who may send requests
or sign in. `site`: error pages, health, metrics and the page of UI components. Templates have the same rooms.
"""
