"""One case from its beginning to its outcome, in plain English, as the stored records have it."""
