"""The text of actions is the contract that people read: parsing is the inverse of printing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.contract.actions import (
    Action,
    Agree,
    Backward,
    Entry,
    Forward,
    Free,
    Receive,
    Reduce,
    Send,
    SwapIn,
    SwapOut,
    Update,
    Value,
    Wait,
    parse_action,
    parse_entry,
    parse_lane,
    parse_value,
)
from planner.contract.errors import FormatError
from planner.contract.schedule import Stream, parse_program, print_program

number = st.integers(0, 10**6)
absent = st.just(-1)
values = st.one_of(
    st.builds(Value, st.sampled_from(["WF", "WB", "G", "K"]), number, replica=absent | number),
    st.builds(Value, st.sampled_from(["I", "X", "S"]), number, number),
    st.builds(Value, st.sampled_from(["Y", "D"]), number, number, device=absent | number),
)
saved = st.builds(Value, st.sampled_from(["AF", "AB"]), number, number)
actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(Forward, number, number),
    st.builds(Backward, number, number),
    *(st.builds(kind, values | saved) for kind in (SwapIn, SwapOut, Send, Receive, Reduce, Free)),
    st.builds(Update, number),
    st.just(Agree()),
)
entries = st.builds(
    Entry,
    actions,
    st.lists(st.builds(Wait, st.builds(Free, values | saved), st.sampled_from([0, 1])), max_size=3).map(
        tuple
    ),
)


@given(values | saved)
def test_a_value_is_what_its_text_parses_to(value: Value) -> None:
    assert parse_value(str(value)) == value


@given(actions)
def test_an_action_is_what_its_text_parses_to(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(entries)
def test_an_entry_is_what_its_text_parses_to(entry: Entry) -> None:
    assert parse_entry(str(entry)) == entry


@given(
    st.text(max_size=20)
    | st.from_regex(r"(in|out|send|F|update)?:?[A-Z]{0,2}\d?[./>]?\d?( after )?.{0,5}", fullmatch=True)
)
def test_any_text_parses_to_what_prints_as_it_or_is_refused(text: str) -> None:
    try:
        entry = parse_entry(text)
    except FormatError:
        return
    assert str(entry) == text


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F3.0", Forward(3, 0)),
        ("B3.12", Backward(3, 12)),
        ("in:WF3", SwapIn(Value("WF", 3))),
        ("out:S3.0", SwapOut(Value("S", 3, 0))),
        ("in:AB2.1", SwapIn(Value("AB", 2, 1))),
        ("send:Y3.0>1", Send(Value("Y", 3, 0, device=1))),
        ("recv:D3.0>1", Receive(Value("D", 3, 0, device=1))),
        ("reduce:G3/1", Reduce(Value("G", 3, replica=1))),
        ("update:3", Update(3)),
        ("agree", Agree()),
        ("free:WB3/0", Free(Value("WB", 3, replica=0))),
    ],
)
def test_the_text_of_each_kind_of_action(text: str, action: Action) -> None:
    assert str(action) == text
    assert parse_action(text) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F3",
        "F3.0.1",
        "f3.0",
        "F03.0",
        "F-1.0",
        "B3.x",
        "F٣.0",
        "in:",
        "in:W3",
        "in:WF3.0",
        "in:X3",
        "in:X3.0>1",
        "in:G3>1",
        "out:YF3.0",
        "load:WF3",
        "update:",
        "update:-1",
        "update:03",
        "update:٣",
        "agree:1",
        "in:WF3 ",
        " in:WF3",
        "in:WF3\n",
    ],
)
def test_a_text_that_is_no_action_is_refused_and_shown(text: str) -> None:
    with pytest.raises(FormatError) as error:
        parse_entry(text)
    assert repr(text.partition(":")[2] if text.startswith(("in:", "out:")) else text) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "F0.0 after ",
        "F0.0 after in:WF3",
        "F0.0 after free:WF3@-2",
        "F0.0 after free:WF3@-",
        "F0.0 after free:WF3  free:WF4",
    ],
)
def test_a_wait_for_what_is_no_free_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_entry(text)


def test_a_bad_text_in_a_stream_is_refused_with_its_place() -> None:
    with pytest.raises(FormatError, match=r"^gpu1/h2d\[2\]: 'WQ3' is no value"):
        parse_lane(1, "h2d", ["in:WF0", "in:WF1", "in:WQ3"])


def test_a_program_is_what_its_streams_print_as() -> None:
    streams = (Stream(0, "compute", ("F0.0", "free:WF0")), Stream(1, "h2d", ("in:WF0 after free:WB1@-1",)))
    assert print_program(parse_program(streams)) == streams


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ((Stream(0, "copy", ()),), r"\$\.programs\.train\[0\]: no stream gpu0/copy; use compute, h2d"),
        ((Stream(-1, "h2d", ()),), r"\$\.programs\.train\[0\]: no stream gpu-1/h2d"),
        ((Stream(0, "h2d", ()), Stream(0, "h2d", ())), r"\$\.programs\.train\[1\]: gpu0/h2d occurs twice"),
    ],
)
def test_a_stream_that_is_none_is_refused_with_its_place(streams: tuple[Stream, ...], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_program(streams)
