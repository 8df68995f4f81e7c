"""The admin site: the audit log and the request records to search and export, and all other tables to view.

Only people are edited here, which is audited (`admin/people.py`). All other changes go through the console and the
control API, whose services audit them.
"""

from controller.admin import configuration, experiments, history, learned, links, people

__all__ = ["configuration", "experiments", "history", "learned", "links", "people"]
