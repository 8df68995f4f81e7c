"""The control API under /api/v1: one resource a file, served by Django REST framework. Writes go through services."""
