"""The browser console and the composition root: settings, URLs and ASGI here, pages and their parts in the packages below."""
