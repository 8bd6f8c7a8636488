"""Find the fastest schedule: drafts by dynamic programming, ranked and refined by sketch, decided by simulation.

    shapes     one pipeline, replicas of one device, or replicas of shorter pipelines
    sizes      pairs of forward and backward microbatch sizes, cut off by their bound
    packs      the packing DP per size and phase, joined at the fused pack, for several numbers of rounds
    sketch     the most promising by estimate; the best of them refined by moving their cuts
    simulate   lower and simulate in that order; the simulator decides

The answer says the smallest bound over all shapes and sizes: no plan in the space is faster.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec

from planner.contract.errors import FormatError, HarmonyError, InfeasibleError, VerifyError
from planner.contract.fixed import Fixed
from planner.contract.hardware import Hardware
from planner.contract.profile import Profile, is_scaled
from planner.contract.schedule import Configuration, check_configuration
from planner.contract.verify import check_host
from planner.search.bounds import Bounds
from planner.search.candidates import Candidate, Freedom, candidates, seeds
from planner.search.critical import critical_path
from planner.search.draft import Cuts, Draft, Residency, configure
from planner.search.fixed import fixed_configuration
from planner.search.outcome import Outcome, check_fits, evaluate, make_schedule, what_limits
from planner.search.pack_models import PackModels, Points
from planner.search.placement import place
from planner.search.problem import Problem, Progress, Result, Shape
from planner.search.refine import Refinement
from planner.search.sketch import INFEASIBLE, Sketcher
from planner.servers import over_servers, samples_of_each

MODES = ("any", "pp", "dp", "hybrid")
ACTIVATIONS = ("any", "recompute")
UPDATES = ("any", "host")
SEED_BUDGET = 400_000
SKETCH_BUDGET = 220_000
COUNT_BUDGET = 350_000
MOVE_BUDGET = 280_000
CHOICE_BUDGET = 120_000
"""Microbatch steps sketched to look at seeds, at candidates, at other numbers of packs, at other cuts: about a third
of a second each."""
NODE_BUDGET = 30_000
"""Actions simulated in one search: a second or two."""
FEWER_DEVICES_GAIN = 1.05
"""Fewer devices are looked at where their first sketches come so close to the best plan on all of them."""
NUM_PACKED = 10
NUM_PER_GROUP = 3
NUM_COUNTED = 5
NUM_MOVED = 3
PLACED_TASKS = 20
MAX_PLACED = 40
"""Packs of a draft whose swaps are placed by integer program: larger ones take it seconds."""
MAX_SIMULATED = 40
SAME = "{:.7g}"
"""Drafts of one kind whose sketches are written alike take the same."""
MAX_RETRIES = 6
TIGHTER = 0.98

Group = tuple[Shape, int, int, tuple[bool, bool, Residency]]
"""A shape, the microbatch sizes, whether it is reflected, whether it may offload and what may be resident."""


def _kind(draft: Draft) -> Group:
    residency: Residency = "some" if any(draft.resident) else "none"
    kind = draft.reflected, bool(draft.offloaded), residency
    return draft.shape, draft.forward_size, draft.backward_size, kind


def plan(
    profile: Profile,
    hardware: Hardware,
    *,
    minibatch: int,
    mode: str = "any",
    activations: str = "any",
    updates: str = "any",
    clip: bool = False,
    num_devices: int | None = None,
    num_servers: int = 1,
    top: int = 1,
    time_limit_seconds: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Result:
    """The fastest schedule for a minibatch, over all servers.

    mode: one pipeline (pp), replicas of one device (dp), replicas of pipelines (hybrid), or the best of all (any).
    activations: `recompute` always, or also keep and offload them (any). updates: on the `host` always, or also on the
    device of weights that stay there (any; not where activations are recomputed, since those plans need not have both
    phases of a pack on one device). clip: gradients are clipped by their global norm, so that updates wait for all of
    them, and run on the host. num_devices: use this many, None: all of them. num_servers: how many of these servers train
    together, each a part of the minibatch. top: how many plans of different
    kinds to return. time_limit_seconds: return the best found by then; without it, same inputs give the same plan.

    Raises HarmonyError for a request that makes no sense; a model that does not fit is a Result with status
    `infeasible`.
    """
    if mode not in MODES:
        raise HarmonyError(f"--mode {mode}: there is no such mode; use one of {', '.join(MODES)}")
    if activations not in ACTIVATIONS:
        raise HarmonyError(f"--activations {activations}: use one of {', '.join(ACTIVATIONS)}")
    if updates not in UPDATES:
        raise HarmonyError(f"--updates {updates}: use one of {', '.join(UPDATES)}")
    if top < 1:
        raise HarmonyError(f"--top {top}: at least one plan is needed")
    problem = _problem(profile, hardware, minibatch, num_devices, num_servers, clip)
    shapes = problem.shapes(mode)
    if not shapes:
        raise HarmonyError(
            f"--mode {mode}: {problem.num_devices} devices and a minibatch of {minibatch} cannot be split that way; "
            f"use --mode any"
        )
    report = progress or (lambda _: None)
    freedom = Freedom(activations == "any", activations == updates == "any" and not problem.agree)
    result = _Search(problem, shapes, freedom, top, time_limit_seconds, report).solve()
    # fewer devices have more of a shared link each: a plan that leaves one idle may be the faster one
    if problem.num_devices > 1 and result.schedule is not None:
        fewer = _problem(profile, hardware, minibatch, problem.num_devices - 1, num_servers, clip)
        search = _Search(fewer, fewer.shapes(mode), freedom, top, time_limit_seconds, report)
        if search.least_seconds(result.seconds) < result.seconds * FEWER_DEVICES_GAIN:
            better = plan(
                profile,
                hardware,
                minibatch=minibatch,
                mode=mode,
                activations=activations,
                updates=updates,
                clip=clip,
                num_devices=fewer.num_devices,
                num_servers=num_servers,
                top=top,
                time_limit_seconds=time_limit_seconds,
                progress=progress,
            )
            if better.seconds < result.seconds:
                elapsed = result.search_seconds + better.search_seconds
                bound = min(result.lower_bound_seconds, better.lower_bound_seconds)
                return replace(better, search_seconds=elapsed, lower_bound_seconds=bound)
    return result


def plan_fixed(
    profile: Profile,
    hardware: Hardware,
    fixed: Fixed | Configuration,
    *,
    minibatch: int,
    clip: bool = False,
    num_devices: int | None = None,
    num_servers: int = 1,
    with_bound: bool = True,
) -> Result:
    """The schedule of a configuration that is given, lowered and simulated like any other.

    with_bound: also the lower bound over all plans; else it is 0. Raises FormatError where it does not belong to the request, InfeasibleError where it does not fit.
    """
    started = time.monotonic()
    problem = _problem(profile, hardware, minibatch, num_devices, num_servers, clip)
    configuration = fixed_configuration(problem, fixed) if isinstance(fixed, Fixed) else fixed
    if isinstance(fixed, Configuration) and fixed.num_servers != num_servers:
        raise FormatError(
            f"the configuration is for {fixed.num_servers} servers, asked for are {num_servers}; say --nodes {fixed.num_servers}"
        )
    configuration = msgspec.structs.replace(
        configuration, agree=configuration.agree or problem.agree, num_servers=num_servers
    )
    if (configuration.minibatch, configuration.num_devices) != (problem.minibatch, problem.num_devices):
        raise FormatError(
            f"the configuration is for {configuration.minibatch} samples on {configuration.num_devices} devices, "
            f"asked for are {problem.minibatch} on {problem.num_devices}{'' if num_servers == 1 else ', of each server'}"
        )
    check_configuration(configuration, problem.costs.num_layers, len(hardware.devices))
    outcome = evaluate(problem, configuration)
    check_fits(problem, outcome)
    bound = 0.0
    if with_bound:
        bounds, shapes = Bounds(problem), problem.shapes()
        bound = min(bounds.seconds(s, *pair) for s in shapes for pair in problem.size_pairs(s.samples))
    schedule = make_schedule(problem, outcome, bound)
    elapsed = time.monotonic() - started
    return Result(
        "found",
        schedule,
        outcome.seconds,
        bound,
        "",
        elapsed,
        1,
        what_limits(outcome),
        critical_path=critical_path(outcome),
    )


def _problem(
    profile: Profile,
    hardware: Hardware,
    minibatch: int,
    num_devices: int | None,
    num_servers: int,
    clip: bool,
) -> Problem:
    if minibatch < 1:
        raise HarmonyError(f"--minibatch {minibatch}: at least one sample is needed")
    available = len(hardware.devices)
    if num_devices is not None and not 1 <= num_devices <= available:
        raise HarmonyError(f"--devices {num_devices}: the hardware has {available}")
    num_devices, agree = num_devices or available, clip or is_scaled(profile)
    return Problem(
        over_servers(profile, hardware, num_servers, num_devices, agree=agree),
        hardware,
        samples_of_each(minibatch, num_servers),
        num_devices,
        agree,
        num_servers=num_servers,
    )


def _patience(problem: Problem) -> int:
    """Many samples a device make every sketch longer: up to twice the budgets, where layers are not many as well."""
    if problem.costs.num_layers > 200:
        return 1
    return max(1, min(2, problem.minibatch // problem.num_devices // 16))


class _Search:
    def __init__(
        self,
        problem: Problem,
        shapes: list[Shape],
        freedom: Freedom,
        top: int,
        time_limit: float | None,
        report: Callable[[Progress], None],
    ) -> None:
        self.problem = problem
        self.freedom = freedom
        self.top = top
        self.report = report
        self.started = time.monotonic()
        self.time_limit = time_limit
        points = Points(problem)
        self.models = {shape: PackModels(problem, shape, points) for shape in shapes}
        self.sketchers = {shape: Sketcher(models) for shape, models in self.models.items()}
        self.bounds = Bounds(problem)
        self.patience = _patience(problem)
        self.sketched: dict[Draft, float] = {}
        self.ordered: list[tuple[float, tuple[Shape, int, int]]] = []
        self.lower_bound = 0.0
        self.found: dict[Group, Outcome] = {}
        """The best that fits, by kind."""
        self.last_fault = ""

    def least_seconds(self, known: float) -> float:
        """The least that the seeds of the most promising shapes take, infinity where no bound is below what is known."""
        if not self.models:
            return INFEASIBLE
        self._bound()
        if self.lower_bound >= known:
            return INFEASIBLE
        self._sketch_seeds(self.patience * SEED_BUDGET // 8)
        return min(self.sketched.values(), default=INFEASIBLE)

    def solve(self) -> Result:
        self._bound()
        costs = self.problem.costs
        last = costs.num_layers - 1
        held = costs.weight_bytes(0, last) + costs.gradient_bytes(0, last) + costs.state_bytes(0, last)
        try:
            check_host(held, self.problem.hardware)
        except InfeasibleError as fault:  # whatever the plan
            elapsed = time.monotonic() - self.started
            return Result("infeasible", None, INFEASIBLE, self.lower_bound, str(fault), elapsed, 0)
        self._sketch_seeds(self.patience * SEED_BUDGET)
        self._sketch_candidates()
        drafts = self._refined()
        simulated, nodes, retries = 0, 0, MAX_RETRIES
        tried: set[Draft] = set()
        while (
            drafts
            and not (self.found and self._is_late())
            and (nodes <= NODE_BUDGET or len(self.found) < self.top)
        ):
            sketched, draft = drafts.pop(0)
            kind = _kind(draft)
            if draft in tried:
                continue
            tried.add(draft)
            if len(self.found) >= self.top and sketched >= self._worst_seconds():
                break
            if kind in self.found and sketched >= self.found[kind].seconds:
                continue
            fits, actions = self._try(draft)
            nodes += actions
            simulated += 1
            best = self._ranked()
            self.report(Progress(simulated, simulated + len(drafts), best[0].seconds if best else None))
            if not fits and retries:
                retries -= 1
                drafts = sorted([self._tightened(draft), *drafts], key=lambda item: item[0])
        elapsed, bound = time.monotonic() - self.started, self.lower_bound
        best = self._ranked()
        if not best:
            reason = self._explain_infeasible()
            return Result("infeasible", None, float("inf"), bound, reason, elapsed, simulated)
        schedule, *others = [make_schedule(self.problem, outcome, bound) for outcome in best[: self.top]]
        return Result(
            "found",
            schedule,
            best[0].seconds,
            min(bound, best[0].seconds),
            "",
            elapsed,
            simulated,
            what_limits(best[0]),
            tuple(others),
            critical_path(best[0]),
        )

    def _ranked(self) -> list[Outcome]:
        return sorted(self.found.values(), key=lambda outcome: outcome.seconds)

    def _worst_seconds(self) -> float:
        """Of the plans that would be returned now."""
        return self._ranked()[self.top - 1].seconds

    def _is_late(self) -> bool:
        """Whether the time is up; not before there is something that fits, by its sketch at least."""
        is_over = self.time_limit is not None and time.monotonic() - self.started > self.time_limit
        return is_over and min(self.sketched.values(), default=INFEASIBLE) < INFEASIBLE

    # ---- drafts

    def _bound(self) -> None:
        """Bounds of all shapes and pairs of sizes, the most promising first."""
        found = [
            (self.bounds.seconds(shape, *pair), (shape, *pair))
            for shape in self.models
            for pair in self.problem.size_pairs(shape.samples)
        ]
        self.lower_bound = min(bound for bound, _ in found)
        self.ordered = sorted(found, key=lambda item: item[0])

    def _sketch(self, draft: Draft) -> None:
        if draft not in self.sketched:
            self.sketched[draft] = self.sketchers[draft.shape].seconds(draft)

    def _is_spent(self, limit: int) -> bool:
        return self._steps() > limit or self._is_late()

    def _sketch_seeds(self, budget: int) -> None:
        """Evened out drafts of the most promising shapes and sizes."""
        for bound, (shape, forward_size, backward_size) in self.ordered:
            if self._is_spent(budget) or bound >= min(self.sketched.values(), default=INFEASIBLE):
                break
            for draft in seeds(self.sketchers[shape], forward_size, backward_size, self.freedom):
                self._sketch(draft)

    def _sketch_candidates(self) -> None:
        """Drafts from the packing, for the sizes that the bound does not rule out: the first few of each, then the
        most promising by estimate."""
        best = min(self.sketched.values(), default=INFEASIBLE)
        promising = [group for bound, group in self.ordered if bound < best][:NUM_PACKED]
        found: list[Candidate] = []
        for shape, models in self.models.items():
            pairs = [(f, b) for other, f, b in promising if other == shape]
            if pairs and not self._is_late():
                found += candidates(models, pairs)
        rank: Counter[tuple[Shape, int, int]] = Counter()
        ordered = []
        for candidate in sorted(found, key=lambda c: c.estimate_seconds):
            group = candidate.shape, candidate.forward_size, candidate.backward_size
            ordered.append((max(0, rank[group] - NUM_PER_GROUP), candidate.estimate_seconds, candidate))
            rank[group] += 1
        limit = self._steps() + self.patience * SKETCH_BUDGET
        for _, _, candidate in sorted(ordered, key=lambda item: item[:2]):
            if self._is_spent(limit):
                break
            self._sketch(candidate.draft())

    def _steps(self) -> int:
        return sum(sketcher.steps for sketcher in self.sketchers.values())

    def _refined(self) -> list[tuple[float, Draft]]:
        """All drafts by their sketch, the best of each group with better packs."""
        sketched = sorted(
            ((seconds, draft) for draft, seconds in self.sketched.items()), key=lambda item: item[0]
        )
        groups: dict[Group, Refinement] = {}
        for seconds, draft in sketched:
            kind = draft.reflected, draft.may_offload, draft.may_reside
            group = draft.shape, draft.forward_size, draft.backward_size, kind
            of_kind = sum(other[-1] == kind for other in groups)
            if group not in groups and of_kind < NUM_COUNTED and seconds < INFEASIBLE:
                groups[group] = Refinement(self.sketchers[draft.shape], draft, seconds)
        for refinement in groups.values():
            if not self._is_late():
                refinement.count_packs(self.patience * COUNT_BUDGET // len(groups))
        best = sorted(groups.values(), key=lambda r: r.seconds)
        for refinement in best[:NUM_MOVED]:
            if not self._is_late():
                refinement.move_cuts(self.patience * MOVE_BUDGET // NUM_MOVED)
        refined = [(r.seconds, r.draft) for r in best]
        if self.freedom.may_keep:
            refined += self._placed(best)
            limit = self._steps() + self.patience * CHOICE_BUDGET
            for refinement in best:
                if not self._is_spent(limit):
                    refinement.move_choices(self.patience * CHOICE_BUDGET // NUM_MOVED)
            refined += [(r.seconds, r.draft) for r in best]
        # those of one kind that take the same are hardly different: one of them is enough
        found: dict[tuple[Group, str], tuple[float, Draft]] = {}
        for seconds, draft in sorted([*refined, *sketched], key=lambda item: item[0]):
            if seconds < INFEASIBLE and len(found) < MAX_SIMULATED:
                filled = self.sketchers[draft.shape].filled(draft)
                found.setdefault((_kind(filled), SAME.format(seconds)), (seconds, filled))
        return list(found.values())

    def _placed(self, best: list[Refinement]) -> list[tuple[float, Draft]]:
        """The best drafts of different kinds with what stays and what goes placed by integer program."""
        found = []
        seen: set[tuple[Shape, int, Cuts]] = set()
        tasks = 0
        for refinement in best:
            draft, sketcher = refinement.draft, self.sketchers[refinement.draft.shape]
            if not 0 < draft.num_forward <= MAX_PLACED or self._is_late():
                continue
            if draft.forward_size != draft.backward_size or draft.may_reside != "none":
                continue
            same = replace(draft, forward_cuts=draft.backward_cuts[:-1], reflected=True)
            if (draft.shape, draft.forward_size, draft.backward_cuts) in seen or tasks >= PLACED_TASKS:
                continue
            seen.add((draft.shape, draft.forward_size, draft.backward_cuts))
            tasks += draft.num_forward + draft.num_backward
            placed = place(same, sketcher.maker)
            if placed is not None:
                found.append((sketcher.seconds(placed), placed))
        return found

    def _tightened(self, draft: Draft) -> tuple[float, Draft]:
        """A draft that did not fit after all, mended for a little less memory."""
        sketcher = self.sketchers[draft.shape]
        limits = list(sketcher.maker.limits)
        sketcher.maker.limits = [int(limit * TIGHTER) for limit in limits]
        reopened = replace(draft, kept=(), offloaded=()) if draft.reflected else draft
        if draft.resident:
            reopened = replace(reopened, resident=(), may_reside="some")
        refinement = Refinement(sketcher, reopened)
        refinement.move_cuts(self.patience * MOVE_BUDGET // 10)
        mended = sketcher.filled(refinement.draft)
        sketcher.maker.limits = limits
        return refinement.seconds, mended

    # ---- simulation

    def _try(self, draft: Draft) -> tuple[bool, int]:
        """Lower and simulate, and keep the best of its kind. Returns whether it fits and how many actions that took."""
        try:
            outcome = evaluate(self.problem, configure(self.problem, draft))
            known = self.found.get(_kind(draft))
            if known is None or outcome.seconds < known.seconds * (1 - 1e-9):
                check_fits(self.problem, outcome)
                self.found[_kind(draft)] = outcome
        except (InfeasibleError, VerifyError) as fault:
            self.last_fault = self.last_fault or str(fault)
            packs = draft.num_forward + 2 * draft.num_backward
            return False, 2_000 + 4 * packs * len(draft.shape.microbatches(draft.backward_size))
        return True, len(outcome.graph.actions)

    def _explain_infeasible(self) -> str:
        """The layer that fits no device, or what was over the limit in the last plan that was tried."""
        costs, limit = self.problem.costs, min(self.problem.limits)
        for i, layer in enumerate(self.problem.profile.layers):
            needed = costs.weight_bytes(i, i) + costs.gradient_bytes(i, i) + costs.backward_workspace(i, i, 1)
            if needed > limit:
                return (
                    f"layer {i} ({layer.name}) alone needs {needed} bytes at a microbatch of 1 sample, {needed - limit} over "
                    f"the limit of {limit} bytes; use devices with {needed} usable bytes, or split the layer"
                )
        fault = self.last_fault or f"no packs fit {limit} bytes per device at any microbatch size"
        return f"{fault}; try a smaller minibatch, more memory per device, or more devices"
