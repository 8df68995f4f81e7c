"""Shared by all resources of the control API: views, fields, pages, errors, descriptions. No resource of its own."""
