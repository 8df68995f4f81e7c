"""Types, events and contracts that every other package shares. Standard library only: read this package first."""
