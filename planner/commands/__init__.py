"""The commands of `harmony-planner`, and what they share."""
