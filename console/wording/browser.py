"""A browser's User-Agent in two or three words."""

from __future__ import annotations

# The first match counts: Edge also says Chrome, and Chrome says Safari.
_BROWSERS = (("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
_SYSTEMS = (
    ("Android", "Android"), ("iPhone", "iPhone"), ("iPad", "iPad"), ("Windows", "Windows"), ("Mac OS X", "macOS"),
    ("Linux", "Linux"),
)  # fmt: skip
LONGEST = 40  # of a program that is no browser


def browser_words(user_agent: str) -> str:
    """Such as "Firefox on Linux"; a program's own name where it is no known browser."""
    browser = next((words for part, words in _BROWSERS if part in user_agent), "")
    system = next((words for part, words in _SYSTEMS if part in user_agent), "")
    if browser:
        return f"{browser} on {system}" if system else browser
    return user_agent[:LONGEST] or "unknown"
