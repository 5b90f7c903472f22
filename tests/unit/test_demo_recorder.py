"""What the demonstration makes of the log and of the card, without a server."""

from pathlib import Path

import pytest

from comfy_multiproc.demo import picture
from comfy_multiproc.demo.recorder import Event, Outstanding, Recorder, Recording, Sample

MB = 1 << 20


def test_a_log_in_colour_reads_as_one_without(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\x1b[32m[INFO]\x1b[0m \x1b[36m[checkpoint_pack]\x1b[0m Process memory: asked ComfyUI (pid 5) for SD1ClipModel: freed, 3 MB\n")
    recorder = Recorder(300 * MB, lambda: ({}, {}, {}), {"ComfyUI": log})
    recorder._sample()
    (event,) = recorder.recording.releases()
    assert event.text == "worker checkpoint_pack asked ComfyUI for SD1ClipModel: 3 MB freed"
    assert (event.who, event.size) == ("ComfyUI", 3)


def test_a_recording_that_breaks_off_is_no_recording() -> None:
    def read() -> tuple[dict[int, int], dict[int, int], dict[int, str]]:
        raise OSError("the card is gone")
    with pytest.raises(OSError, match="gone"), Recorder(300 * MB, read, {}):
        pass
    with pytest.raises(ConnectionError), Recorder(300 * MB, read, {}):
        raise ConnectionError("what went wrong first is said")


def test_what_has_appeared_is_not_drawn_as_claimed_too() -> None:
    outstanding = Outstanding()
    assert outstanding.of({1: 10}, {1: 240}) == {1: 240}
    assert outstanding.of({1: 82}, {1: 240}) == {1: 168}          # the claim is not lowered yet
    assert outstanding.of({1: 82}, {1: 168}) == {1: 168}          # now it is
    assert outstanding.of({1: 400}, {1: 168}) == {1: 0}
    assert outstanding.of({1: 40}, {1: 168, 2: 5}) == {1: 168, 2: 5}


def recording() -> Recording:
    made = Recording(300 * MB, names={1: "ComfyUI"}, peak=200 * MB)
    made.samples = [Sample(0, {1: 200 * MB}, {}), Sample(10, {1: 200 * MB}, {}), Sample(10, {}, {}), Sample(40, {}, {})]
    made.events = [Event(0, "step", "in the host"), Event(12, "step", "after it"), Event(38, "end", "after it")]
    return made


def test_the_picture_ends_where_there_is_nothing_more_to_see(tmp_path: Path) -> None:
    made = recording()
    assert (made.eventful, made.length) == (12, 40)
    picture.draw({"with the series": made}, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def test_the_text_explains_only_marks_that_it_has() -> None:
    made = recording()
    assert not [line for line in picture.text(made) if "▼" in line or "×" in line]
    made.events.append(Event(11, "release", "", "ComfyUI", 3))
    (line,) = [line for line in picture.text(made) if "▼ given back" in line]
    assert "×" not in line
