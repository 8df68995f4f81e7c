"""Writes: typed keyword-only functions `<entity>_<action>`, by concern; beside the folders, what every change uses.

A change by a person names its `actor` and the `version` it was made from; it leaves an audit Decision with before and
after, and raises the configuration version where a gateway must know, all in one transaction. Wrong values raise
django.core.exceptions.ValidationError with the field's name, a stale version raises VersionConflict.
"""
