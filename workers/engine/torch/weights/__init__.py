"""The weights of a real model: read from files, checked by digest, moved between engines."""
