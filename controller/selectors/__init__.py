"""Reads, by concern. Each function says how many queries it makes where that is more than one."""
