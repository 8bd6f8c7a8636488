"""The search for the fastest schedule: `plan(profile, hardware, minibatch=...) -> Result`."""

from planner.search.problem import Progress, Result
from planner.search.search import plan, plan_fixed

__all__ = ["Progress", "Result", "plan", "plan_fixed"]
