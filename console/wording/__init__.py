"""Words that only pages need: verdicts, error budgets, engine settings. Decisions are worded in controller.wording."""
