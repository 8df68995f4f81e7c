"""Words of pages alone: attainment, error budgets, engine settings. Decisions are worded in controller.wording."""
