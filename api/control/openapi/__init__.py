"""The OpenAPI document of both APIs, and the pages that show it."""
