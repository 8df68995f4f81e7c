"""OpenAI's API as clients see it: request bodies in, responses and errors out. No scheduling."""
