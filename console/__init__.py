"""The browser console: settings, URLs and ASGI here (the composition root), pages and their parts in the packages."""
