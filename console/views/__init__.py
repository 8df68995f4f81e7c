"""Pages: one family of pages a file. Views translate; selectors read and services write.

Here: traffic, fleet, scaling, experiments and the audit. `configuration`: SLO classes and priority mappings.
`accounts`: who may send requests or sign in. `site`: error pages, health, metrics and the page of UI components.
"""
