"""A schedule that is right verifies; each way of breaking it is refused with where, what and what to do.

The programs are in tests/planner/tiny.py, written by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.contract.errors import FormatError, HarmonyError, InfeasibleError, VerifyError
from planner.contract.profile import Profile
from planner.contract.schedule import (
    BackwardPack,
    Configuration,
    ForwardPack,
    Microbatches,
    Programs,
    Schedule,
    Stream,
)
from planner.contract.verify import verify
from tests.planner.tiny import (
    MICROBATCHES,
    ONE,
    ONE_PROGRAM,
    PROFILE,
    THREE,
    THREE_PROGRAM,
    TWO,
    TWO_PROGRAM,
    Program,
    graph_of,
    hardware,
    mutated,
    peak_bytes,
    schedule_of,
)

replace = msgspec.structs.replace

CASES = {"one": (ONE_PROGRAM, ONE), "two": (TWO_PROGRAM, TWO), "three": (THREE_PROGRAM, THREE)}

STATEFUL_LAYERS = tuple(replace(layer, stochastic=i == 1) for i, layer in enumerate(PROFILE.layers))


def check(program: Program, configuration: Configuration, profile: Profile = PROFILE) -> None:
    verify(schedule_of(program, configuration, profile=profile), profile, hardware(configuration.num_devices))


@pytest.mark.parametrize("case", CASES)
def test_a_program_written_by_hand_verifies(case: str) -> None:
    check(*CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_verify_returns_the_peak_of_each_device(case: str) -> None:
    program, configuration = CASES[case]
    found = verify(schedule_of(program, configuration), PROFILE, hardware(configuration.num_devices))
    assert [peak.nbytes for peak in found] == peak_bytes(program, configuration)


# (program, stream, lines, in their place, message)
FAULTS: dict[str, tuple[str, str, Sequence[str], Sequence[str], str]] = {
    "weights come after what is computed with them": (
        "one", "gpu0/h2d", ("in:WF0", "in:I0.0", "in:I0.1", "in:WB1 after free:WF0"), ("in:I0.0", "in:I0.1", "in:WB1 after free:WF0", "in:WF0"),
        r"deadlock: .*gpu0/h2d\[2\] in:WB1 waits for",
    ),
    "a value is freed before its last use": (
        "one", "gpu0/compute", ("F0.1", "free:WF0"), ("free:WF0", "F0.1"),
        r"deadlock: gpu0/compute\[2\] free:WF0 waits for gpu0/compute\[3\] F0\.1 waits for gpu0/compute\[2\] free:WF0",
    ),
    "backward runs before the backward that feeds it": (
        "one", "gpu0/compute", ("B1.1", "free:WB1", "free:X1.1", "free:Y0.1", "B0.0", "free:X0.0", "free:D1.0", "B0.1"),
        ("B0.0", "free:X0.0", "free:D1.0", "B0.1", "B1.1", "free:WB1", "free:X1.1", "free:Y0.1"),
        "deadlock",
    ),
    "weights stay for ever": (
        "one", "gpu0/compute", ("free:WF0",), (), r"gpu0/h2d\[3\] in:WB1: waits for free:WF0, which is in no stream"
    ),
    "a stash stays for ever": (
        "three", "gpu0/d2h", ("free:S0.1",), (), r"gpu0/compute\[2\] F0\.1: makes S0\.1, and no stream frees it; add free:S0\.1"
    ),
    "a batch stays for ever": (
        "one", "gpu0/compute", ("free:X0.1",), (), r"gpu0/h2d\[8\] in:X0\.1: makes X0\.1, and no stream frees it; add free:X0\.1"
    ),
    "a value is freed twice": (
        "one", "gpu0/compute", ("free:X0.1",), ("free:X0.1", "free:X0.1"), r"gpu0/compute\[18\] free:X0\.1: occurs twice, before at gpu0/compute\[17\]"
    ),
    "a value that nobody made is freed": (
        "one", "gpu0/compute", ("free:X0.1",), ("free:X0.1", "free:S0.0"), r"gpu0/compute\[18\] free:S0\.0: frees S0\.0, which no action makes"
    ),
    "weights never come in": (
        "one", "gpu0/h2d", ("in:WF0",), (), r"gpu0/compute\[0\] F0\.0: needs WF0 on the gpu, which no action puts there"
    ),
    "targets never come in": (
        "one", "gpu0/h2d", ("in:X1.1",), (), r"gpu0/compute\[8\] B1\.1: needs X1\.1 on the gpu, which no action puts there"
    ),
    "weights come in twice": (
        "one", "gpu0/h2d", ("in:WF0",), ("in:WF0", "in:WF0"), r"gpu0/h2d\[1\] in:WF0: occurs twice, before at gpu0/h2d\[0\]"
    ),
    "a stash never leaves": (
        "three", "gpu0/d2h", ("out:S0.1",), (), r"gpu0/h2d\[8\] in:X1\.1: needs S0\.1 on the host, which no action puts there"
    ),
    "gradients never leave": (
        "one", "gpu0/d2h", ("out:G0",), (), r"gpu0/host\[1\] update:0: needs G0 on the host, which no action puts there"
    ),
    "a send that nobody receives": (
        "two", "gpu1/recv", ("recv:Y0.1>1",), (), r"gpu0/send\[2\] send:Y0\.1>1: nothing receives Y0\.1>1"
    ),
    "a recv that nobody sends": (
        "two", "gpu0/send", ("send:Y0.1>1",), (), r"gpu1/recv\[1\] recv:Y0\.1>1: nothing sends Y0\.1>1"
    ),
    "a send beside what anybody receives": (
        "two", "gpu0/send", ("send:D1.1>1",), ("send:D1.1>1", "send:D1.1>0"), r"gpu0/send\[7\] send:D1\.1>0: nothing receives D1\.1>0"
    ),
    "receives in another order than their sends": (
        "two", "gpu1/recv", ("recv:Y0.0>1", "recv:Y0.1>1"), ("recv:Y0.1>1", "recv:Y0.0>1"), "deadlock: .*(send|recv):Y0"
    ),
    "two devices that both send first": (
        "two", "gpu0/send", ("send:Y0.1>1", "free:Y0.1", "send:D1.0>1", "free:D1.0"), ("send:D1.0>1", "free:D1.0", "send:Y0.1>1", "free:Y0.1"), "deadlock"
    ),
    "layers are never updated": (
        "one", "gpu0/host", ("update:1",), (), r"update:1 is in no stream; every trainable layer is updated once, backward pack 1 is not"
    ),
    "layers are updated twice": (
        "one", "gpu0/host", ("update:1",), ("update:1", "update:1"), r"gpu0/host\[1\] update:1: occurs twice"
    ),
    "samples skip a forward": (
        "one", "gpu0/compute", ("F0.1",), (), r"F0\.1 is in no stream; every sample goes through every layer once"
    ),
    "samples skip a backward": (
        "one", "gpu0/compute", ("B0.1",), (), r"B0\.1 is in no stream; every sample goes through every layer once"
    ),
    "a backward in the stream of copies": (
        "one", "gpu0/d2h", ("free:G0",), ("free:G0", "in:X0.1"), r"in:X0\.1: occurs twice|gpu0/d2h\[4\] in:X0\.1: belongs to gpu0/h2d"
    ),
    "an update on the device though planned for the host": (
        "one", "gpu0/host", ("update:1", "update:0"), ("update:1",), r"update:0 is in no stream"
    ),
    "a wait for a free that no stream has": (
        "one", "gpu0/h2d", ("in:WB0 after free:WB1",), ("in:WB0 after free:WF7",), r"gpu0/h2d\[6\] in:WB0 after|gpu0/h2d\[6\] in:WB0: waits for free:WF7, which is in no stream"
    ),
    "a wait for a free that comes later": (
        "one", "gpu0/h2d", ("in:WB1 after free:WF0",), ("in:WB1 after free:WB0",), r"deadlock: .*in:WB1 waits for .*free:WB0"
    ),
    "a reload ahead of its own offload": (
        "three", "gpu0/d2h", ("out:S0.1", "free:S0.1", "out:G2", "free:G2", "out:G1", "free:G1"), ("out:G2", "free:G2", "out:G1", "free:G1", "out:S0.1", "free:S0.1"),
        r"deadlock: .*out:S0\.1",
    ),
    "a pack that the configuration does not have": (
        "one", "gpu0/compute", ("F0.1",), ("F0.1", "F3.0"), r"gpu0/compute\[3\] F3\.0: no such pack, microbatch or replica in the configuration"
    ),
    "a microbatch that the configuration does not have": (
        "one", "gpu0/compute", ("F0.1",), ("F0.1", "F0.2"), r"gpu0/compute\[3\] F0\.2: no such pack, microbatch or replica in the configuration"
    ),
    "weights that the configuration does not have": (
        "one", "gpu0/h2d", ("in:WF0",), ("in:WF0", "in:WF5"), r"gpu0/h2d\[1\] in:WF5: no such pack, microbatch or replica in the configuration"
    ),
    "a copy on a device that does not exist": (
        "two", "gpu0/send", ("send:D1.1>1",), ("send:D1.1>1", "send:D1.1>7"), r"gpu0/send\[7\] send:D1\.1>7: (nothing receives|no such)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_with_its_own_message(fault: str) -> None:
    case, place, old, new, message = FAULTS[fault]
    program, configuration = CASES[case]
    with pytest.raises(VerifyError, match=message):
        check(mutated(program, place, old, new), configuration)


@pytest.mark.parametrize(
    ("case", "place", "stream", "text"),
    [
        ("one", "gpu0/compute", "gpu0/h2d", "F0.1"),
        ("one", "gpu0/h2d", "gpu0/compute", "in:WF0"),
        ("one", "gpu0/h2d", "gpu0/d2h", "in:WF0"),
        ("one", "gpu0/host", "gpu0/compute", "update:0"),
        ("two", "gpu0/send", "gpu0/recv", "send:D1.1>1"),
        ("two", "gpu0/h2d", "gpu1/h2d", "in:WF0"),
        ("two", "gpu0/compute", "gpu1/compute", "free:WF0"),
    ],
)
def test_an_action_in_the_wrong_stream_is_refused(case: str, place: str, stream: str, text: str) -> None:
    program, configuration = CASES[case]
    moved = mutated(mutated(program, place, (text,), ()), stream, (), (text,))
    # in front of its new stream: nothing but the stream is wrong with most of them
    with pytest.raises(
        VerifyError,
        match=rf"{stream}\[0\] {text}: belongs to {place.replace('compute', '(compute|any stream)') if 'free' in text else place}|deadlock",
    ):
        check(moved, configuration)


def test_an_action_in_the_wrong_stream_is_told_where_it_belongs() -> None:
    moved = mutated(
        mutated(ONE_PROGRAM, "gpu0/d2h", ("out:G0",), ()), "gpu0/h2d", ("in:X0.1",), ("in:X0.1", "out:G0")
    )
    with pytest.raises(VerifyError, match=r"gpu0/h2d\[9\] out:G0: belongs to gpu0/d2h"):
        check(mutated(moved, "gpu0/d2h", ("free:G0",), ("free:G0",)), ONE)


@pytest.mark.parametrize("device", [0, 1])
def test_a_program_without_one_of_its_devices_is_refused(device: int) -> None:
    program = {place: texts for place, texts in TWO_PROGRAM.items() if not place.startswith(f"gpu{device}/")}
    with pytest.raises(VerifyError, match=r"needs|nothing sends|nothing receives|is in no stream"):
        check(program, TWO)


def test_a_reload_waits_for_its_own_offload_from_another_stream() -> None:
    graph = graph_of(THREE_PROGRAM, THREE)
    names = [str(action) for action in graph.actions]
    reload = names.index("in:X1.1")
    assert "out:S0.1" in [names[other] for other, ago in graph.waits[reload] if ago == 0]


def test_forward_weights_wait_for_the_update_of_the_iteration_before() -> None:
    graph = graph_of(ONE_PROGRAM, ONE)
    names = [str(action) for action in graph.actions]
    waits = [(names[other], ago) for other, ago in graph.waits[names.index("in:WF0")]]
    assert ("update:0", 1) in waits


@pytest.mark.parametrize("case", CASES)
def test_memory_that_is_just_enough_verifies_and_one_byte_less_is_refused(case: str) -> None:
    program, configuration = CASES[case]
    schedule = schedule_of(program, configuration)
    enough = max(peak_bytes(program, configuration))
    verify(schedule, PROFILE, hardware(configuration.num_devices, enough))
    with pytest.raises(
        InfeasibleError, match=rf"{enough} bytes at gpu\d/\S+ \S+, 1 over the limit of {enough - 1} bytes"
    ):
        verify(schedule, PROFILE, hardware(configuration.num_devices, enough - 1))


def test_reserved_memory_is_not_for_the_plan() -> None:
    [enough] = peak_bytes(ONE_PROGRAM, ONE)
    server = hardware(1, enough + 10)
    reserving = replace(server, devices=(replace(server.devices[0], reserved_bytes=11),))
    with pytest.raises(InfeasibleError, match="1 over the limit"):
        verify(schedule_of(ONE_PROGRAM, ONE), PROFILE, reserving)


def test_a_peak_above_what_the_schedule_promises_is_refused() -> None:
    [peak] = peak_bytes(ONE_PROGRAM, ONE)
    verify(schedule_of(ONE_PROGRAM, ONE, peak_bytes=peak), PROFILE, hardware())
    with pytest.raises(
        VerifyError, match=rf"reaches {peak} bytes at gpu0/compute\[\d+\] \S+, the schedule says {peak - 1}"
    ):
        verify(schedule_of(ONE_PROGRAM, ONE, peak_bytes=peak - 1), PROFILE, hardware())


@pytest.mark.parametrize("field", ["memory_bytes", "pinnable_bytes"])
def test_a_host_that_is_too_small_is_refused_by_the_limit_that_it_breaks(field: str) -> None:
    server = hardware()
    # W + dW + K of 350, 350 and 700; two batches of 6 + 4 bytes a sample; a stash of 10 bytes a sample
    needed = 1400 + 2 * 4 * 10 + 0
    needed_with_stash = needed + 4 * 10
    for program, configuration, figure in (
        (ONE_PROGRAM, ONE, needed),
        (THREE_PROGRAM, THREE, needed_with_stash),
    ):
        schedule = schedule_of(program, configuration)
        verify(schedule, PROFILE, replace(server, host=replace(server.host, **{field: figure})))
        with pytest.raises(
            InfeasibleError, match=rf"host: {figure} bytes .*1 over its {field} of {figure - 1}"
        ):
            verify(schedule, PROFILE, replace(server, host=replace(server.host, **{field: figure - 1})))


@pytest.mark.parametrize(
    "other",
    [
        replace(PROFILE, model=replace(PROFILE.model, structure_hash="4567")),
        replace(PROFILE, dtype="bfloat16"),
        replace(PROFILE, layers=(replace(PROFILE.layers[0], weight_bytes=101), *PROFILE.layers[1:])),
        replace(PROFILE, edges=PROFILE.edges[:-1]),
    ],
)
def test_a_schedule_of_another_profile_is_refused_by_naming_both(other: Profile) -> None:
    with pytest.raises(
        FormatError,
        match=r"planned for model 'tiny' \([0-9a-f]{16}\), the profile is of 'tiny' \([0-9a-f]{16}\)",
    ):
        verify(schedule_of(ONE_PROGRAM, ONE), other, hardware())


def test_an_agreement_that_no_update_waits_for_is_refused() -> None:
    program = {**ONE_PROGRAM, "gpu0/host": ("agree", *ONE_PROGRAM["gpu0/host"])}
    with pytest.raises(VerifyError, match=r"gpu0/host\[0\] agree: the configuration's agree is false"):
        check(program, ONE)


@pytest.mark.parametrize(("name", "value"), [("dtype", "bfloat16"), ("optimizer", "sgd")])
def test_a_schedule_that_was_edited_to_other_types_is_refused(name: str, value: str) -> None:
    schedule = schedule_of(ONE_PROGRAM, ONE)
    edited = replace(schedule, profile=replace(schedule.profile, **{name: value}))
    with pytest.raises(
        FormatError, match=rf"\$\.profile\.{name}: the schedule says '{value}', its profile '"
    ):
        verify(edited, PROFILE, hardware())


def test_other_times_are_the_same_model() -> None:
    costs = tuple(replace(cost, seconds=9.0) for cost in PROFILE.layers[0].forward)
    slower = replace(PROFILE, layers=(replace(PROFILE.layers[0], forward=costs), *PROFILE.layers[1:]))
    verify(schedule_of(ONE_PROGRAM, ONE), slower, hardware())


def test_a_server_with_fewer_devices_is_refused() -> None:
    with pytest.raises(FormatError, match="uses 2 devices, the hardware has 1"):
        verify(schedule_of(TWO_PROGRAM, TWO), PROFILE, hardware(1))


def test_packs_that_leave_out_layers_of_the_profile_are_refused() -> None:
    short = replace(ONE, backward_packs=(BackwardPack(0, 0, 0), BackwardPack(1, 1, 0)))
    long = replace(ONE, backward_packs=(BackwardPack(0, 0, 0), BackwardPack(1, 3, 0)))
    for configuration in (short, long):
        with pytest.raises(FormatError, match=r"cover [24] layers, the profile has 3"):
            verify(schedule_of(ONE_PROGRAM, configuration), PROFILE, hardware())


@pytest.mark.parametrize("field", ["stochastic", "batch_coupled"])
def test_unequal_microbatches_are_refused_where_recompute_would_see_another_batch(field: str) -> None:
    layers = (PROFILE.layers[0], replace(PROFILE.layers[1], **{field: True}), PROFILE.layers[2])
    profile = replace(PROFILE, layers=layers)
    unequal = replace(ONE, microbatches=Microbatches(((0, 2), (2, 4)), ((0, 4),)))
    with pytest.raises(
        VerifyError, match=r"layer 1 \(b\) (draws random numbers|depends on its microbatch).*must be the same"
    ):
        check({}, unequal, profile)
    check(ONE_PROGRAM, ONE, profile)


def test_unequal_microbatches_verify_where_nothing_depends_on_them() -> None:
    unequal = replace(ONE, microbatches=Microbatches(MICROBATCHES.forward, ((0, 4),)))
    program = {
        "gpu0/compute": (
            *("F0.0", "free:I0.0", "F0.1", "free:WF0", "free:I0.1"),
            *("B1.0", "free:WB1", "free:X1.0", "free:Y0.0", "free:Y0.1"),
            *("B0.0", "free:WB0", "free:X0.0", "free:D1.0"),
        ),
        "gpu0/h2d": (
            "in:WF0",
            "in:I0.0",
            "in:I0.1",
            "in:WB1 after free:WF0",
            "in:X1.0",
            "in:WB0 after free:WB1",
            "in:X0.0",
        ),
        "gpu0/d2h": ("out:G1", "free:G1", "out:G0", "free:G0"),
        "gpu0/host": ("update:1", "update:0"),
    }
    check(program, unequal)


def test_weights_that_stay_are_made_by_nobody() -> None:
    """A resident pack updated on the device: no weights, gradients or states move."""
    configuration = replace(
        ONE,
        forward_packs=(ForwardPack(0, 0, 0, weights="resident"),),
        backward_packs=(
            BackwardPack(0, 0, 0, weights="resident", update="device"),
            BackwardPack(1, 2, 0, weights="resident", update="device"),
        ),
    )
    program = {
        "gpu0/compute": (
            *("F0.0", "free:I0.0", "F0.1", "free:I0.1"),
            *("B1.0", "free:X1.0", "free:Y0.0", "B1.1", "free:X1.1", "free:Y0.1", "update:1", "free:G1"),
            *("B0.0", "free:X0.0", "free:D1.0", "B0.1", "free:X0.1", "free:D1.1", "update:0", "free:G0"),
        ),
        "gpu0/h2d": ("in:I0.0", "in:I0.1", "in:X1.0", "in:X1.1", "in:X0.0", "in:X0.1"),
    }
    check(program, configuration)
    with pytest.raises(VerifyError, match=r"gpu0/h2d\[6\] in:WB0: makes WB0, which is already there"):
        check(mutated(program, "gpu0/h2d", ("in:X0.1",), ("in:X0.1", "in:WB0")), configuration)
    with pytest.raises(VerifyError, match=r"free:WB0: frees WB0, which no action makes"):
        check(mutated(program, "gpu0/compute", ("free:G0",), ("free:G0", "free:WB0")), configuration)


def test_saved_activations_leave_and_come_back() -> None:
    """Layer 0 is saved in forward instead of recomputed: kept for microbatch 0, offloaded for microbatch 1."""
    configuration = replace(
        ONE,
        backward_packs=(
            replace(ONE.backward_packs[0], activations=("keep", "offload")),
            ONE.backward_packs[1],
        ),
    )
    program = mutated(ONE_PROGRAM, "gpu0/d2h", (), ("out:AF0.1", "free:AF0.1"))
    program = mutated(program, "gpu0/h2d", ("in:X0.1",), ("in:X0.1", "in:AB0.1"))
    program = mutated(program, "gpu0/compute", ("free:D1.0",), ("free:D1.0", "free:AF0.0"))
    program = mutated(program, "gpu0/compute", ("free:D1.1",), ("free:D1.1", "free:AB0.1"))
    check(program, configuration)
    with pytest.raises(VerifyError, match=r"in:AB0\.1: needs AF0\.1 on the host, which no action puts there"):
        check(mutated(program, "gpu0/d2h", ("out:AF0.1",), ()), configuration)
    with pytest.raises(VerifyError, match=r"B0\.1: needs AB0\.1 on the gpu, which no action puts there"):
        check(
            mutated(mutated(program, "gpu0/h2d", ("in:AB0.1",), ()), "gpu0/compute", ("free:AB0.1",), ()),
            configuration,
        )


LINES = [
    (case, place, i)
    for case, (program, _) in CASES.items()
    for place, texts in program.items()
    for i in range(len(texts))
]


@pytest.mark.parametrize(("case", "place", "position"), LINES)
def test_no_line_of_a_program_can_be_left_out(case: str, place: str, position: int) -> None:
    program, configuration = CASES[case]
    texts = list(program[place])
    del texts[position]
    with pytest.raises(VerifyError):
        check({**program, place: texts}, configuration)


words = st.sampled_from(
    [
        *(text for program, _ in CASES.values() for texts in program.values() for text in texts),
        *(
            "agree",
            "reduce:G0/1",
            "reduce:G1",
            "in:K0",
            "out:K1",
            "out:WB0",
            "in:AB0.0",
            "out:AF0.1",
            "out:WF3",
            "send:D0.9>1",
        ),
        *(
            "send:Y1.0>5",
            "recv:Y1.0>5",
            "recv:X0.0",
            "in:G0",
            "in:Y0.0",
            "free:K7",
            "update:9",
            "in:S0.0",
            "out:D0.1",
            "in:WF0/3",
        ),
        *("out:X0.0", "free:D1.0>0", "B9.0", "F9.9", "in:X0.0 after free:X0.0@-1", "in:A0.0", "free:G0/7"),
    ]
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_any_program_verifies_or_is_refused(case: str, data: st.DataObject) -> None:
    """Never an error of another kind: the texts of a file are anybody's."""
    program, configuration = CASES[case]
    streams = []
    for place, texts in program.items():
        changed = list(texts)
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, len(changed)))
            changed[at : at + data.draw(st.integers(0, 1))] = data.draw(st.lists(words, max_size=2))
        device, _, stream = place.removeprefix("gpu").partition("/")
        streams.append(Stream(int(device), stream, tuple(changed)))
    broken: Schedule = replace(schedule_of(program, configuration), programs=Programs(tuple(streams)))
    # any other error goes through
    with contextlib.suppress(HarmonyError):
        verify(broken, PROFILE, hardware(configuration.num_devices))
