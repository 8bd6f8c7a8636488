"""Every wrong file is refused with its path, the place inside and what to do; a file is written whole or not at all."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.contract import store
from planner.contract.actions import STREAMS
from planner.contract.errors import FormatError
from planner.contract.hardware import Hardware
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule
from planner.contract.trace import DeviceSummary, MemorySample, Span, Trace
from tests.planner.tiny import ONE, ONE_PROGRAM, PROFILE, hardware, schedule_of

TRACE = Trace(
    origin="measured",
    model="tiny",
    model_hash="12",
    schedule_hash="34",
    devices=(DeviceSummary(10, 20, 30, 40, 50),),
    iteration_seconds=(0.5, 0.25),
    spans=(Span("F0.0", 0, "compute", 0.125, 0.25), Span("in:WF0", 0, "h2d", 0.0, 0.125, 100, 1, True)),
    memory=(MemorySample(0, 0.25, 7),),
    losses=(2.0, 1.5),
    samples_per_iteration=4,
    notes={"torch": "2", "steps": 3},
)
NOUNS: dict[str, Profile | Hardware | Schedule | Trace] = {
    "profile": PROFILE,
    "hardware": hardware(2),
    "schedule": schedule_of(ONE_PROGRAM, ONE),
    "trace": TRACE,
}
LOADERS: dict[str, Callable[[str | Path], Any]] = {
    "profile": store.load_profile,
    "hardware": store.load_hardware,
    "schedule": store.load_schedule,
    "trace": store.load_trace,
}

kinds = pytest.mark.parametrize("kind", NOUNS)


def written(kind: str) -> dict[str, Any]:
    """The file of a good noun as plain data."""
    body: dict[str, Any] = json.loads(store.encode(NOUNS[kind]))
    return body


def load(tmp_path: Path, kind: str, body: object) -> Any:
    path = tmp_path / f"{kind}.json"
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return LOADERS[kind](path)


def at(body: Any, *steps: str | int) -> Any:
    for step in steps:
        body = body[step]
    return body


@kinds
def test_a_noun_is_what_its_file_loads_as(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file.json"
    store.save(NOUNS[kind], path)
    assert LOADERS[kind](path) == NOUNS[kind]


@kinds
def test_the_same_noun_gives_the_same_bytes_and_its_schema_comes_first(tmp_path: Path, kind: str) -> None:
    store.save(NOUNS[kind], tmp_path / "a.json")
    store.save(LOADERS[kind](tmp_path / "a.json"), tmp_path / "b.json")
    text = (tmp_path / "a.json").read_bytes()
    assert text == (tmp_path / "b.json").read_bytes()
    assert f'"harmony-{kind}/1"' in text.decode()
    if kind != "trace":
        assert text.decode().splitlines()[1] == f' "schema": "harmony-{kind}/1",'


def test_one_action_a_line() -> None:
    lines = store.encode(NOUNS["schedule"]).decode().splitlines()
    assert any(line.strip() == '"in:WB1 after free:WF0",' for line in lines)


@kinds
def test_a_truncated_file_is_refused_with_its_path(tmp_path: Path, kind: str) -> None:
    text = store.encode(NOUNS[kind]).decode()
    for end in (0, 1, len(text) // 2, len(text) - 3):
        with pytest.raises(FormatError, match=rf"{kind}\.json: "):
            load(tmp_path, kind, text[:end])


@kinds
def test_another_version_is_refused_by_naming_both(tmp_path: Path, kind: str) -> None:
    body = written(kind)
    (body["harmony"] if kind == "trace" else body)["schema"] = f"harmony-{kind}/2"
    with pytest.raises(FormatError, match=rf"'harmony-{kind}/2', this version reads 'harmony-{kind}/1'"):
        load(tmp_path, kind, body)


@kinds
def test_a_file_without_schema_is_refused(tmp_path: Path, kind: str) -> None:
    body = written(kind)
    del (body["harmony"] if kind == "trace" else body)["schema"]
    with pytest.raises(FormatError, match=r"its schema is 'missing'"):
        load(tmp_path, kind, body)


@kinds
def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "empty.json"
    path.write_text("\n")
    with pytest.raises(FormatError, match=r"empty.json: is empty"):
        getattr(store, f"load_{kind}")(path)


@kinds
def test_another_file_is_refused_as_such(tmp_path: Path, kind: str) -> None:
    other = "hardware" if kind == "profile" else "profile"
    with pytest.raises(FormatError, match=rf"this is a {other} file .*, needed here is a {kind} file"):
        load(tmp_path, kind, written(other))


@kinds
def test_an_unknown_field_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    body = written(kind)
    (body["harmony"] if kind == "trace" else body)["weigth_bytes"] = 1
    with pytest.raises(FormatError, match="weigth_bytes"):
        load(tmp_path, kind, body)


@kinds
@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}", "nothing"])
def test_what_is_no_object_of_ours_is_refused(tmp_path: Path, kind: str, text: str) -> None:
    with pytest.raises(FormatError, match=rf"{kind}\.json: "):
        load(tmp_path, kind, text)


@pytest.mark.parametrize(
    ("kind", "path", "value", "place"),
    [
        ("profile", ("layers", 1, "forward", 0, "seconds"), "0.1", r"$.layers[1].forward[0].seconds"),
        ("profile", ("layers", 1, "weight_bytes"), 1.5, r"$.layers[1].weight_bytes"),
        ("profile", ("layers", 2, "backward", 1, "saved_bytes"), "x", r"$.layers[2].backward[1].saved_bytes"),
        ("profile", ("edges", 0, "src"), None, r"$.edges[0].src"),
        ("profile", ("layers",), {}, r"$.layers"),
        ("hardware", ("devices", 1, "memory_bytes"), "16GiB", r"$.devices[1].memory_bytes"),
        ("hardware", ("host_links", 0, "sharing"), "some", r"$.host_links[0].sharing"),
        ("schedule", ("configuration", "mode"), "tp", r"$.configuration.mode"),
        (
            "schedule",
            ("configuration", "forward_packs", 0, "weights"),
            "hold?",
            r"$.configuration.forward_packs[0].weights",
        ),
        ("schedule", ("programs", "train", 0, "actions", 3), 7, r"$.programs.train[0].actions[3]"),
        ("trace", ("harmony", "devices", 0, "peak_bytes"), None, r"$.harmony.devices[0].peak_bytes"),
    ],
)
def test_a_wrong_type_is_refused_with_its_place(
    tmp_path: Path, kind: str, path: tuple[str | int, ...], value: object, place: str
) -> None:
    body = written(kind)
    at(body, *path[:-1])[path[-1]] = value
    with pytest.raises(FormatError) as error:
        load(tmp_path, kind, body)
    assert place in str(error.value)
    assert f"{kind}.json" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "path", "value", "place"),
    [
        # timings taken cold or with a broken clock
        ("profile", ("layers", 1, "forward", 0, "seconds"), 0.0, "$.layers[1].forward[0].seconds: 0.0"),
        ("profile", ("layers", 1, "forward", 2, "seconds"), -1e-3, "$.layers[1].forward[2].seconds: -0.001"),
        ("profile", ("layers", 0, "backward", 0, "seconds"), 1e308, "$.layers[0].backward[0].seconds: 1e+308"),
        ("profile", ("layers", 0, "weight_bytes"), 10**30, "$.layers[0].weight_bytes"),
        ("profile", ("layers", 0, "backward", 0, "seconds"), 1e400, "out of range - at `$.layers[0].backward[0].seconds`"),
        ("profile", ("layers", 0, "update", "host_seconds"), -1.0, "$.layers[0].update.host_seconds: -1.0"),
        ("profile", ("layers", 0, "update", "device_seconds"), 1e400, "out of range - at `$.layers[0].update.device_seconds`"),
        ("profile", ("layers", 0, "weight_bytes"), -4, "$.layers[0].weight_bytes: -4"),
        ("profile", ("layers", 0, "forward", 0, "peak_bytes"), -4, "$.layers[0].forward[0].peak_bytes: -4"),
        ("profile", ("layers", 0, "backward", 0, "saved_bytes"), -4, "$.layers[0].backward[0].saved_bytes: -4"),
        ("profile", ("layers", 0, "forward", 0, "spread_seconds"), -4.0, "$.layers[0].forward[0].spread_seconds: -4.0"),
        ("profile", ("layers", 0, "forward"), [], "$.layers[0].forward: no microbatch size"),
        ("profile", ("layers", 0, "forward", 1, "microbatch_size"), 1, "$.layers[0].forward[1].microbatch_size: 1 after 1"),
        ("profile", ("layers", 0, "forward", 0, "microbatch_size"), 0, "$.layers[0].forward[0].microbatch_size: 0 after 0"),
        ("profile", ("layers",), [], "$.layers: a profile needs at least one layer"),
        ("profile", ("edges", 1, "dst"), 0, "$.edges[1]: from 0 to 0"),
        ("profile", ("edges", 1, "dst"), 9, "$.edges[1]: from 0 to 9"),
        ("profile", ("edges", 1, "bytes_per_sample"), -9, "$.edges[1].bytes_per_sample: -9 bytes"),
        ("profile", ("ties",), [{"layers": [0, 7], "weight_bytes": 4}], "$.ties[0].layers: [0, 7]"),
        ("profile", ("ties",), [{"layers": [0], "weight_bytes": 4}], "$.ties[0].layers: [0]"),
        ("profile", ("target_bytes_per_sample",), -1, "$.target_bytes_per_sample: -1"),
        ("hardware", ("devices",), [], "$.devices: a server needs at least one device"),
        ("hardware", ("devices", 0, "host_link"), 1, "$.devices[0].host_link: 1; there are 1 links"),
        ("hardware", ("devices", 0, "reserved_bytes"), 10**6, "$.devices[0]: 1000000 bytes of which 1000000"),
        ("hardware", ("devices", 0, "reserved_bytes"), -1, "$.devices[0].reserved_bytes: -1"),
        ("hardware", ("devices", 1, "compute_scale"), 0.0, "$.devices[1].compute_scale: 0.0"),
        ("hardware", ("host_links", 0, "h2d_bytes_per_second"), 0.0, "$.host_links[0]: 0.0 bytes per second"),
        ("hardware", ("host_links", 0, "latency_seconds"), -1.0, "$.host_links[0].latency_seconds: -1.0"),
        ("hardware", ("peer_bytes_per_second",), -1.0, "$.peer_bytes_per_second: -1.0; a rate"),
        ("hardware", ("peer_bytes_per_second",), [[0.0, 1.0]], "$.peer_bytes_per_second: the matrix must be 2 x 2"),
        ("hardware", ("peer_bytes_per_second",), [[0.0, 1.0], [0.0, 0.0]], "$.peer_bytes_per_second: 0.0; a rate"),
        ("hardware", ("host", "update_workers"), 0, "$.host.update_workers: 0"),
        ("hardware", ("host", "pinnable_bytes"), -1, "$.host.pinnable_bytes: -1"),
        ("hardware", ("devices", 0, "memory_bytes"), 10**30, "$.devices[0].memory_bytes"),
        ("hardware", ("devices", 1, "compute_scale"), 1e308, "$.devices[1].compute_scale: 1e+308; a speed is from"),
        ("hardware", ("host_links", 0, "h2d_bytes_per_second"), 1e-300, "$.host_links[0]: 1e-300 bytes per second"),
        ("hardware", ("host_links", 0, "latency_seconds"), 1e30, "$.host_links[0].latency_seconds: 1e+30"),
        ("schedule", ("configuration", "mode"), "dp", "$.configuration.mode: dp, but 1 replicas of 1 devices are pp"),
        ("schedule", ("configuration", "backward_packs", 0, "seconds"), [1.0], "backward_packs[0].seconds: 1 times for"),
        ("schedule", ("configuration", "forward_packs", 0, "seconds"), [-1.0] * 4, "forward_packs[0].seconds"),
        ("schedule", ("configuration", "backward_packs", 0, "update_seconds"), -1.0, "backward_packs[0].update_seconds: -1.0"),
        ("schedule", ("configuration", "num_devices"), 2, "$.configuration.num_devices: 2, the hardware has 1"),
        ("schedule", ("configuration", "minibatch"), 5, "$.configuration.microbatches.forward: covers 4 of 5"),
        ("schedule", ("configuration", "microbatches", "forward"), [[0, 2]], "$.configuration.microbatches.forward: covers 2 of 4"),
        ("schedule", ("configuration", "microbatches", "backward"), [[0, 3], [2, 4]], "$.configuration.microbatches.backward[1]"),
        ("schedule", ("configuration", "forward_packs", 0, "last"), 1, "$.configuration.forward_packs: covers 2 layers"),
        ("schedule", ("configuration", "backward_packs", 1, "first"), 2, "the forward packs end where the fused pack starts, at 2"),
        ("schedule", ("configuration", "backward_packs", 1, "device"), 1, "$.configuration.backward_packs[1].device: 1"),
        ("schedule", ("configuration", "backward_packs"), [], "$.configuration.backward_packs: none"),
        ("schedule", ("configuration", "backward_packs", 0, "activations"), ["keep"], "backward_packs[0].activations: 1 choices"),
        ("schedule", ("predicted", "devices"), [], "$.predicted.devices: 0 devices"),
        ("schedule", ("programs", "train", 0, "actions", 3), "G3.0", "gpu0/compute[3]: 'G3.0' is no action"),
        ("schedule", ("programs", "train", 0, "stream"), "copy", "$.programs.train[0]: no stream gpu0/copy"),
    ],
)  # fmt: skip
def test_a_figure_that_cannot_be_true_is_refused_with_its_place(
    tmp_path: Path, kind: str, path: tuple[str | int, ...], value: object, place: str
) -> None:
    body = written(kind)
    holder = at(body, *path[:-1])
    holder[path[-1]] = value
    with pytest.raises(FormatError) as error:
        load(tmp_path, kind, json.dumps(body).replace("Infinity", "1e400"))
    assert place in str(error.value)
    assert f"{kind}.json" in str(error.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path, number: str) -> None:
    text = store.encode(PROFILE).decode().replace('"seconds": 0.001', f'"seconds": {number}')
    assert number in text
    with pytest.raises(FormatError, match=r"profile\.json: "):
        load(tmp_path, "profile", text)


def test_a_field_with_a_default_may_be_absent(tmp_path: Path) -> None:
    body = written("profile")
    assert "stochastic" not in body["layers"][0]
    assert load(tmp_path, "profile", body).layers[0].stochastic is False


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X"},
        {
            "ph": "X",
            "name": "F0.0",
            "pid": 0,
            "tid": 99,
            "ts": 0,
            "dur": 1,
            "args": {"bytes": 0, "iteration": 0, "overrun": False},
        },
        {
            "ph": "X",
            "name": "F0.0",
            "pid": 7,
            "tid": 0,
            "ts": 0,
            "dur": 1,
            "args": {"bytes": 0, "iteration": 0, "overrun": False},
        },
        {
            "ph": "X",
            "name": 5,
            "pid": 0,
            "tid": 0,
            "ts": 0,
            "dur": 1,
            "args": {"bytes": 0, "iteration": 0, "overrun": False},
        },
        {
            "ph": "X",
            "name": "F0.0",
            "pid": 0,
            "tid": 0,
            "ts": 0,
            "dur": -1,
            "args": {"bytes": 0, "iteration": 0, "overrun": False},
        },
        {"ph": "X", "name": "F0.0", "pid": 0, "tid": 0, "ts": "0", "dur": 1, "args": {}},
        {"ph": "C", "name": "allocated", "pid": 0, "ts": 0, "args": []},
        {"ph": "C", "name": "allocated", "pid": 3, "ts": 0, "args": {"bytes": 1}},
        {"name": "F0.0"},
    ],
)
def test_events_that_are_not_ours_are_refused(tmp_path: Path, event: dict[str, object]) -> None:
    body = written("trace")
    body["traceEvents"].append(event)
    with pytest.raises(FormatError, match=r"trace\.json: \$\.traceEvents"):
        load(tmp_path, "trace", body)


def test_a_trace_is_valid_for_perfetto() -> None:
    body = written("trace")
    assert isinstance(body["traceEvents"], list)
    assert body["displayTimeUnit"] in ("ms", "ns")
    names = {}
    for event in body["traceEvents"]:
        assert event["ph"] in ("X", "M", "C")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            names[event["pid"], event.get("tid")] = event["args"]["name"]
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert all(isinstance(number, int | float) for number in event["args"].values())
    spans = [event for event in body["traceEvents"] if event["ph"] == "X"]
    assert [(names[e["pid"], e["tid"]], e["ts"], e["dur"]) for e in spans] == [
        ("compute", 125e3, 125e3),
        ("h2d", 0, 125e3),
    ]
    assert names[0, None] == "gpu0 measured"
    assert {name for (_, tid), name in names.items() if tid is not None} == set(STREAMS)


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedule.json"
    path.write_text("the old one")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(NOUNS["schedule"], path)
    assert path.read_text() == "the old one"
    assert [item.name for item in tmp_path.iterdir()] == ["schedule.json"]


def test_a_file_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schedule.json"
    path.write_text("the old one")
    seen = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((path.read_text(), self.read_bytes()))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    store.save(NOUNS["schedule"], path)
    assert seen == [("the old one", store.encode(NOUNS["schedule"]))]


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    for loader in (*LOADERS.values(), store.load_schedule_or_trace):
        with pytest.raises(FileNotFoundError, match=r"none\.json"):
            loader(tmp_path / "none.json")


def test_standard_input_and_output_stand_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    class Standard:
        def __init__(self, data: bytes) -> None:
            self.buffer = io.BytesIO(data)

        def flush(self) -> None:
            """Nothing to do."""

    out = Standard(b"")
    monkeypatch.setattr("sys.stdout", out)
    store.save(PROFILE, "-")
    monkeypatch.setattr("sys.stdin", Standard(out.buffer.getvalue()))
    assert store.load_profile("-") == PROFILE


def test_schedule_or_trace_loads_whichever_it_is(tmp_path: Path) -> None:
    for kind, noun_type in (("schedule", Schedule), ("trace", Trace)):
        store.save(NOUNS[kind], tmp_path / kind)
        assert isinstance(store.load_schedule_or_trace(tmp_path / kind), noun_type)
    store.save(PROFILE, tmp_path / "profile")
    with pytest.raises(FormatError, match="this is a profile file"):
        store.load_schedule_or_trace(tmp_path / "profile")


def test_the_schedule_hash_names_configuration_and_program_and_nothing_else() -> None:
    schedule = schedule_of(ONE_PROGRAM, ONE)
    replace = msgspec.structs.replace
    same = replace(
        schedule,
        hardware=hardware(1, 5),
        options={"a": 1},
        predicted=replace(schedule.predicted, host_bytes=5),
    )
    assert store.schedule_hash(same) == store.schedule_hash(schedule)
    shorter = replace(schedule, programs=replace(schedule.programs, train=schedule.programs.train[:-1]))
    assert store.schedule_hash(shorter) != store.schedule_hash(schedule)
    other = replace(schedule, configuration=replace(schedule.configuration, agree=True))
    assert store.schedule_hash(other) != store.schedule_hash(schedule)


def test_the_json_schemas_beside_the_profiles_are_up_to_date() -> None:
    folder = Path(__file__).parents[3] / "profiles"
    for name, schema in store.json_schemas().items():
        assert (folder / name).read_bytes() == msgspec.json.format(
            msgspec.json.encode(schema), indent=1
        ) + b"\n", f"{name} is old; make schema writes it"


def test_every_field_is_explained_in_the_readme() -> None:
    text = (Path(__file__).parents[3] / "profiles" / "README.md").read_text()
    for schema in store.json_schemas().values():
        for name, definition in schema["$defs"].items():
            # a file has spans and memory samples as events
            for field in () if name in ("Span", "MemorySample") else definition["properties"]:
                assert re.search(rf"\b{field}\b", text), f"profiles/README.md says nothing of {field}"


def test_nouns_are_what_the_loaders_return() -> None:
    assert [type(noun) for noun in NOUNS.values()] == [Profile, Hardware, Schedule, Trace]


def test_schedule_hash_does_not_depend_on_how_the_schedule_came_here() -> None:
    """A pickled schedule hashed otherwise than the file it was loaded from, and a valid run was refused."""
    schedule = NOUNS["schedule"]
    assert isinstance(schedule, Schedule)
    assert store.schedule_hash(pickle.loads(pickle.dumps(schedule))) == store.schedule_hash(schedule)
