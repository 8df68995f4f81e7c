"""Ray clusters that exist: which they are, their Jobs REST, and the launcher that an engine's job runs. Nothing here
imports Ray, so versions need not match."""
