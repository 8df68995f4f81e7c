"""Parts of bench-pd."""
