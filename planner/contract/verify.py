"""A schedule against a profile and a hardware: nothing, or a VerifyError that says what is wrong and where.

Checked: every dependency holds in every stream order and there is no deadlock (precedence.py finds the cycle);
every value is made once, there when it is used, and freed once; every sample goes through every layer once
forward and once backward; every trainable layer is updated once; the memory of each device and of the host
stays within its limit whatever the timing (memory.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.contract import schedule as schedules
from planner.contract.actions import Action, Agree, Backward, Forward, Free, SwapOut, Update, Value
from planner.contract.errors import FormatError, InfeasibleError, VerifyError
from planner.contract.hardware import Hardware, budget_bytes
from planner.contract.memory import Peak, peaks
from planner.contract.precedence import Graph
from planner.contract.profile import Profile, is_scaled, model_hash
from planner.contract.rules import Rules
from planner.contract.schedule import Schedule


def verify(schedule: Schedule, profile: Profile, hardware: Hardware) -> list[Peak]:
    """Check a schedule; return each device's peak.

    Raises FormatError (it does not belong to the profile or hardware) or VerifyError (it breaks a rule).
    """
    schedules.check(schedule)
    check_belongs(schedule, profile, hardware)
    rules = Rules(profile, schedule.configuration)
    check_microbatches(rules)
    graph = Graph(schedules.parse_program(schedule.programs.train), rules)
    check_program(graph)
    found = peaks(graph, schedule.configuration.num_devices)
    check_memory(found, rules, hardware)
    for device, (peak, predicted) in enumerate(zip(found, schedule.predicted.devices, strict=True)):
        if peak.nbytes > predicted.peak_bytes:
            raise VerifyError(
                f"gpu{device}: the program reaches {peak.nbytes} bytes at {peak.where}, "
                f"the schedule says {predicted.peak_bytes}; plan it again"
            )
    return found


def check_belongs(schedule: Schedule, profile: Profile, hardware: Hardware) -> None:
    """Raise FormatError where a schedule was planned for another model or other hardware."""
    ours, theirs = model_hash(profile), schedule.profile.model_hash
    if ours != theirs:
        raise FormatError(
            f"the schedule was planned for model {schedule.profile.model.name!r} ({theirs}), "
            f"the profile is of {profile.model.name!r} ({ours}); use its own profile or plan again"
        )
    for name in ("dtype", "optimizer"):
        planned, present = getattr(schedule.profile, name), getattr(profile, name)
        if planned != present:
            raise FormatError(
                f"$.profile.{name}: the schedule says {planned!r}, its profile {present!r}; plan again"
            )
    if is_scaled(profile) and not schedule.configuration.agree:
        raise FormatError(
            "$.configuration.agree: false, but float16 gradients overflow, and updates must know of it; plan again"
        )
    covered, layers = schedule.configuration.backward_packs[-1].last + 1, len(profile.layers)
    if covered != layers:
        raise FormatError(f"$.configuration.backward_packs: cover {covered} layers, the profile has {layers}")
    needed, available = schedule.configuration.num_devices, len(hardware.devices)
    if needed > available:
        raise FormatError(
            f"the schedule uses {needed} devices, the hardware has {available}; plan for this hardware"
        )


def check_microbatches(rules: Rules) -> None:
    """Recompute must see the samples that forward saw where a layer draws random numbers or looks at the batch; what a
    layer remembers of batches must be of all of them."""
    servers = rules.configuration.num_servers
    for i, layer in enumerate(rules.profile.layers):
        if servers > 1 and layer.batch_coupled and layer.buffer_bytes:
            raise VerifyError(
                f"layer {i} ({layer.name}) keeps statistics of its batches, and {servers} servers see different ones; plan for one "
                f"server, or use a normalisation that keeps none"
            )
    if rules.forward_samples == rules.backward_samples:
        return
    for i, layer in enumerate(rules.profile.layers):
        if layer.stochastic or layer.batch_coupled:
            what = "draws random numbers" if layer.stochastic else "depends on its microbatch"
            raise VerifyError(
                f"layer {i} ({layer.name}) {what}: forward microbatches {rules.forward_samples[:2]}... and backward "
                f"{rules.backward_samples[:2]}... must be the same"
            )


def check_program(graph: Graph) -> None:
    """Every action in its place, everything done once, everything there when used and freed once."""
    rules = graph.rules
    for node, action in enumerate(graph.actions):
        lane = graph.lanes[graph.lane_of[node]]
        try:
            device, stream = rules.place(action)
        except (LookupError, VerifyError):
            raise VerifyError(
                f"{graph.where(node)}: no such pack, microbatch or replica in the configuration"
            ) from None
        if device >= rules.configuration.num_devices:
            raise VerifyError(
                f"{graph.where(node)}: on gpu{device}, the configuration has {rules.configuration.num_devices} devices"
            )
        if lane.device != device or (stream and lane.stream != stream):
            raise VerifyError(f"{graph.where(node)}: belongs to gpu{device}/{stream or 'any stream'}")
    if Agree() in graph.node_of and not rules.configuration.agree:
        raise VerifyError(
            f"{graph.where(graph.node_of[Agree()])}: the configuration's agree is false, so that no update waits for it; "
            f"plan again"
        )
    _check_residents(rules)
    for action in required(rules):
        if action not in graph.node_of:
            raise VerifyError(f"{action} is in no stream; {_why_required(action)}")
    _check_values(graph)


def required(rules: Rules) -> Iterator[Action]:
    """What every program must do, beyond what its own reads demand."""
    for p, forward in enumerate(rules.forward_packs):
        for j in range(len(rules.forward_samples)):
            yield Forward(p, j)
        changes = rules.costs.mutated_buffer_bytes(forward.first, forward.last) > 0
        if changes and forward.weights != "resident":
            yield SwapOut(Value("WF", p, replica=rules.replica_tag(0)))
    for b, pack in enumerate(rules.backward_packs):
        for i in range(len(rules.backward_samples)):
            yield Backward(b, i)
        if rules.is_trained(b):
            yield Update(b)
        for replica in _written_back_by(rules, b):
            yield SwapOut(Value("WB", b, replica=rules.replica_tag(replica)))
        if pack.update == "device" and pack.weights != "resident":
            yield SwapOut(Value("K", b))


def _check_residents(rules: Rules) -> None:
    """A replica that is not the owner would keep old weights."""
    for b, pack in enumerate(rules.backward_packs):
        if pack.weights == "resident" and rules.is_trained(b) and len(rules.replicas) > 1:
            raise VerifyError(
                f"backward pack {b}: trained and resident on {len(rules.replicas)} replicas, of which only replica "
                f"{rules.owner(b)} updates it"
            )
        if pack.weights == "resident" and rules.is_trained(b) and pack.update == "host":
            raise VerifyError(
                f"backward pack {b}: resident and updated on the host, its device would keep old weights"
            )


def _written_back_by(rules: Rules, b: int) -> list[int]:
    """The replicas whose weights (an update on the device: its owner's) or buffers (as in DDP: the first's) go out."""
    pack = rules.backward_packs[b]
    if pack.weights == "resident":
        return []
    updated = {rules.owner(b)} if pack.update == "device" and rules.is_trained(b) else set()
    mutated = {0} if b == rules.fused and rules.costs.mutated_buffer_bytes(pack.first, pack.last) else set()
    return sorted(updated | mutated)


def _why_required(action: Action) -> str:
    match action:
        case Update(pack):
            return f"every trainable layer is updated once, backward pack {pack} is not"
        case SwapOut(value):
            return f"the host would keep an old {value}"
        case _:
            return "every sample goes through every layer once"


def _check_values(graph: Graph) -> None:
    rules = graph.rules
    residents = set(rules.residents())
    for value, makers in graph.makers.items():
        if len(makers) > 1 or value in residents:
            raise VerifyError(f"{graph.where(makers[-1])}: makes {value}, which is already there")
        if Free(value) not in graph.node_of:
            raise VerifyError(
                f"{graph.where(makers[0])}: makes {value}, and no stream frees it; add free:{value}"
            )
    for node, action in enumerate(graph.actions):
        for place, value in graph.effects[node].reads:
            if value in residents or (place, value) in graph.writers:
                continue
            if rules.is_persistent((place, value)):
                continue
            raise VerifyError(
                f"{graph.where(node)}: needs {value} on the {place}, which no action puts there"
            )
        if isinstance(action, Free) and action.value not in graph.makers:
            raise VerifyError(f"{graph.where(node)}: frees {action.value}, which no action makes")


def check_memory(found: list[Peak], rules: Rules, hardware: Hardware) -> None:
    """Raise InfeasibleError where a device or the host has less than the program needs."""
    for device, peak in enumerate(found):
        limit = budget_bytes(hardware.devices[device])
        if peak.nbytes > limit:
            raise InfeasibleError(
                f"gpu{device}: {peak.nbytes} bytes at {peak.where}, {peak.nbytes - limit} over the limit of {limit} bytes; "
                f"plan with more memory or smaller microbatches"
            )
    check_host(rules.host_bytes(), hardware)


def check_host(needed: int, hardware: Hardware) -> None:
    """Raise InfeasibleError where the host has less memory, or less that can be pinned, than `needed` bytes."""
    host = hardware.host
    for name, limit in (("memory_bytes", host.memory_bytes), ("pinnable_bytes", host.pinnable_bytes)):
        if needed > limit:
            raise InfeasibleError(
                f"host: {needed} bytes for weights, gradients, optimizer states and stashes, "
                f"{needed - limit} over its {name} of {limit}; add host memory or use a smaller minibatch"
            )
