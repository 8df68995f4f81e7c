"""The admin site: the audit and the request records to search and export, all else of ours to look at.

Nothing of ours is edited here: changes go through the console and the control API, whose services audit them. People
are: their changes are audited too (`admin/people.py`).
"""

from controller.admin import configuration, experiments, history, links, people

__all__ = ["configuration", "experiments", "history", "links", "people"]
