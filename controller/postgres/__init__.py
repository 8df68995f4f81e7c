"""A Django database backend for PostgreSQL whose client gives up on a server that hangs."""
