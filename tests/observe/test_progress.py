"""What a person sees: golden text of plain lines, and the live line on a real terminal."""

import io
import os
import pty
import sys

import pytest
from rich.console import Console

from varuna.events import (
    CaptureFinished,
    CheckFinished,
    CheckpointSaved,
    Evaluated,
    EventBus,
    Notice,
    PlanChosen,
    StepFinished,
    TrainFinished,
    TrainStarted,
)
from varuna.observe import progress_listener, show_progress
from varuna.observe.live import LiveLine
from varuna.observe.progress import LiveProgress, PlainProgress, plain_interval_s
from varuna.observe.stepline import StepLine, bar
from varuna.observe.text import human_bytes, human_count, human_duration, sparkline
from varuna.spec import PipelineSpec, Plan, SectionSpec, StageSpec, Step


class HandClock:
    def __init__(self):
        self.time_s = 100.0

    def now_s(self):
        return self.time_s


def step(index, **changes):
    values = {
        "index": index,
        "loss": 5.5 / (index + 1),
        "weight": 32.0,
        "num_samples": 32,
        "grad_norm": 2.0 / (index + 1),
        "lr": 3e-4,
        "learning_rates": (3e-4,),
        "skipped": False,
        "loss_scale": 1.0,
        "duration_s": 0.5,
        "samples_per_s": 64.0,
        "tokens_per_s": 12345.6,
        "memory_bytes": 312 * 2**20,
    }
    return Step(**{**values, **changes})


SECTIONS = tuple(
    SectionSpec(
        index=i, name=f"h.{i}", parameter_names=(), parameter_bytes=4, forward_flops=1.0, output_bytes=8
    )
    for i in range(2)
)
PLAN = Plan(
    pipelines=(
        PipelineSpec(
            stages=(
                StageSpec(worker_index=0, first_section=0, end_section=1),
                StageSpec(worker_index=1, first_section=1, end_section=2),
            ),
            first_micro_batch=0,
            end_micro_batch=4,
        ),
    ),
    num_workers=2,
    num_sections=2,
    batch_size=32,
    micro_batch_size=8,
    schedule="varuna",
)


def run_plain(events_at, clock=None):
    """Text of (seconds after the one before, event) pairs."""
    stream = io.StringIO()
    clock = clock or HandClock()
    listener = PlainProgress(
        stream, clock, lambda plan, sections: f"{len(sections)} sections\n\n{plan.schedule}"
    )
    for after_s, event in events_at:
        clock.time_s += after_s
        listener(event)
    return stream.getvalue()


def test_plain_lines_golden():
    text = run_plain(
        [
            (0, CaptureFinished(sections=SECTIONS, duration_s=3.21, from_cache=False)),
            (0, CheckFinished(max_difference=1.24e-16)),
            (0, PlanChosen(generation=1, plan=PLAN, reason="2 stages as asked")),
            (0, Notice(text="the model has an unused parameter: head.bias")),
            (0, TrainStarted(first_step=0, num_steps=200)),
            (8, StepFinished(step=step(0))),
            *[(0.5, StepFinished(step=step(index))) for index in range(1, 12)],
            (0, Evaluated(loss=2.34567, num_samples=1234, duration_s=3.1)),
            (0, TrainFinished(num_steps=12, duration_s=82.4, error="KeyboardInterrupt")),
        ]
    )
    assert text == (
        "Model: 2 sections, captured in 3.21 s.\n"
        "Check: the split step equals the unsplit one (largest difference 1.2e-16).\n"
        "Plan 1: 2 stages as asked\n"
        "  2 sections\n"
        "\n"
        "  varuna\n"
        "Note: the model has an unused parameter: head.bias\n"
        "Training: steps 1 to 200.\n"
        "step   1/200  loss 5.5000   norm 2.00     lr 3.00e-04  12.3k tok/s   312 MiB  26:32 left\n"
        "step  11/200  loss 0.5000   norm 0.18     lr 3.00e-04  12.3k tok/s   312 MiB  1:34 left\n"
        "Evaluation: loss 2.3457 over 1,234 samples in 3.10 s.\n"
        "Stopped after 12 steps, 1:22 (KeyboardInterrupt).\n"
    )


def test_a_checkpoint_of_which_less_is_known_says_less():
    known = CheckpointSaved(step=360, url="/c/360", size_bytes=2048, pause_s=0.01, write_s=1.5)
    taken_over = CheckpointSaved(step=360, url="/c/360", size_bytes=0, pause_s=0.0, write_s=0.0)
    text = run_plain([(0, known), (0, taken_over)])
    assert text == (
        "Checkpoint: step 360, 2.00 KiB in 1.5 s, training paused 10 ms: /c/360\nCheckpoint: step 360: /c/360\n"
    )


def test_plain_lines_of_a_short_run_golden():
    """First, every tenth of the way, last; samples when there are no tokens; a skipped step says so."""
    text = run_plain(
        [
            (0, CaptureFinished(sections=SECTIONS[:1], duration_s=0.05, from_cache=True)),
            (0, CheckFinished(max_difference=0.0, skipped_reason="switched off")),
            (0, TrainStarted(first_step=20, num_steps=20)),
            *[
                (
                    0.1,
                    StepFinished(
                        step=step(
                            index,
                            tokens_per_s=None,
                            skipped=index == 22,
                            loss_scale=65536.0,
                            lr=1e-5,
                            memory_bytes=3 * 2**30,
                        )
                    ),
                )
                for index in range(20, 26)
            ],
            (0, TrainFinished(num_steps=1, duration_s=0.61)),
        ]
    )
    end = "lr 1.00e-05     64 samples/s  3.00 GiB"
    assert text == (
        "Model: 1 section, from the cache in 0.05 s.\n"
        "Check: left out, switched off.\n"
        "Training: steps 21 to 40.\n"
        f"step 21/40  loss 0.2619   norm 9.5e-02  {end}  2 s left\n"
        f"step 22/40  loss 0.2500   norm 9.1e-02  {end}  2 s left\n"
        f"step 23/40  loss 0.2391   norm 8.7e-02  {end}  2 s left  skipped: overflow at loss scale 65536\n"
        f"step 24/40  loss 0.2292   norm 8.3e-02  {end}  2 s left\n"
        f"step 26/40  loss 0.2115   norm 7.7e-02  {end}  1 s left\n"
        "Trained 1 step in 0.61 s.\n"
    )


def test_the_interval_of_plain_lines_grows_to_a_minute():
    assert [plain_interval_s(s) for s in (0, 300, 600, 3600, 10**6)] == [5.0, 5.0, 10.0, 60.0, 60.0]
    events = [(0, TrainStarted(first_step=0, num_steps=10**6))]
    events += [(1.0, StepFinished(step=step(index))) for index in range(7200)]
    lines = run_plain(events).splitlines()
    assert 60 + 60 < len(lines) < 300


@pytest.mark.parametrize("width", range(12, 160, 7))
@pytest.mark.parametrize("skipped", [False, True])
def test_the_live_line_fits_any_width_and_keeps_the_loss(width, skipped):
    line = StepLine(
        step=step(41, skipped=skipped, loss_scale=65536.0),
        num_done=42,
        num_steps=1000,
        end_step=1000,
        losses=(3.0, 2.0, 1.0),
        left_s=3723.0,
    ).live(width)
    assert line.cell_len <= width
    if width >= 26:
        assert "loss 0.1310" in line.plain
    if width >= 117 and not skipped:
        assert line.plain.endswith("  1:02:03 left")
        assert "█▅▁" in line.plain
    if width >= 40:
        assert ("skipped" in line.plain) == skipped
    if width >= 117 and not skipped:
        assert line.plain.startswith(("  42/1000 ━━━━━━", "  42/1000 ╸━━━━━"))


def test_bar_counts_half_columns():
    assert bar(0.0, 4).plain == "━━━━"
    assert [len(bar(share, 4).plain) for share in (0, 0.1, 0.125, 0.5, 1, 2)] == [4] * 6
    assert bar(0.125, 4).plain == "╸━━━"
    assert [str(span.style) for span in bar(0.5, 4).spans] == ["green", "bright_black"]
    assert bar(0.5, 4).spans[1].start == 2


def through_terminal(act, monkeypatch, width=100):
    """What ``act(stream)`` writes to a real pseudo-terminal."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, writer = pty.openpty()
    try:
        with os.fdopen(writer, "w", encoding="utf-8") as stream:
            act(stream)
            stream.write("THE END")
            stream.flush()
            text = b""
            while not text.endswith(b"THE END"):
                text += os.read(reader, 1 << 16)
        return text.decode()
    finally:
        os.close(reader)


def play(listener, clock):
    listener(TrainStarted(first_step=0, num_steps=3))
    for index in range(3):
        clock.time_s += 1.0
        listener(StepFinished(step=step(index)))
    listener(Evaluated(loss=1.5, num_samples=1, duration_s=1.0))
    listener(TrainFinished(num_steps=3, duration_s=3.0))


def test_a_terminal_gets_a_live_line_and_keeps_its_cursor(monkeypatch):
    clock = HandClock()

    def act(stream):
        listener = progress_listener(stream=stream, clock=clock)
        assert isinstance(listener, LiveProgress)
        play(listener, clock)

    text = through_terminal(act, monkeypatch)
    assert "3/3" in text
    assert "\x1b[1;32m1.8333" in text  # the loss, in colour
    assert "Evaluation: loss 1.5000 over 1 sample in 1.00 s." in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    first_line = text.index("0/3 waiting for the first step")
    assert text.index("\x1b[?25h", first_line) < text.index("1/3")  # visible while it runs, too
    assert not isinstance(sys.stdout, LiveLine)


def test_no_color_is_respected(monkeypatch):
    clock = HandClock()

    def act(stream):
        monkeypatch.setenv("NO_COLOR", "1")
        play(progress_listener(stream=stream, clock=clock), clock)

    text = through_terminal(act, monkeypatch)
    assert "3/3" in text
    assert ";32m" not in text
    assert "[32m" not in text


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    def act(stream):
        monkeypatch.setenv("TERM", "dumb")
        listener = progress_listener(stream=stream)
        assert isinstance(listener, PlainProgress)
        listener(Notice(text="plain"))

    through_terminal(act, monkeypatch)
    assert isinstance(progress_listener(stream=io.StringIO()), PlainProgress)


def test_an_exception_in_training_gives_the_terminal_back(monkeypatch):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    before = sys.stdout
    listener = LiveProgress(console, HandClock())
    listener(TrainStarted(first_step=0, num_steps=3))
    listener(TrainFinished(num_steps=0, duration_s=1.0, error="DataError: bad"))
    assert sys.stdout is before
    assert stream.getvalue().rstrip().endswith("Stopped after 0 steps, 1.00 s (DataError).")
    listener(TrainFinished(num_steps=0, duration_s=1.0, error="WantedEnd: 0"))
    assert stream.getvalue().rstrip().endswith("Stopped after 0 steps, 1.00 s (told to leave).")
    listener(TrainStarted(first_step=50, num_steps=0))
    assert "Training: all 50 steps are done.\n" in stream.getvalue()
    listener(TrainFinished(num_steps=0, duration_s=0.1))
    listener(TrainStarted(first_step=0, num_steps=3))  # and it can begin again
    listener(TrainFinished(num_steps=0, duration_s=1.0))


def test_only_worker_0_shows_progress():
    stream = io.StringIO()
    for worker_index in (0, 1, 2):
        bus = EventBus()
        show_progress(bus, worker_index, stream=stream, clock=HandClock())
        bus.publish(Notice(text=f"worker {worker_index}"))
    assert stream.getvalue() == "Note: worker 0\n"


def test_numbers_as_people_read_them():
    assert [human_count(x) for x in (0, 7.123, 950, 999.6, 12345.6, 1.5e6, 2e9, 3e12)] == [
        "0", "7.12", "950", "1.00k", "12.3k", "1.50M", "2.00G", "3.00T",
    ]  # fmt: skip
    assert human_count(float("nan")) == "nan"
    assert [human_bytes(x) for x in (0, 512, 1024, 312 * 2**20, 1.24 * 2**30)] == [
        "0 B", "512 B", "1.00 KiB", "312 MiB", "1.24 GiB",
    ]  # fmt: skip
    assert [human_duration(x) for x in (0.523, 12.34, 59.6, 60, 245, 3723, 90061)] == [
        "0.52 s", "12.3 s", "59.6 s", "1:00", "4:05", "1:02:03", "1 d 1:01:01",
    ]  # fmt: skip


def test_sparkline():
    assert sparkline([1, 2, 3]) == "▁▅█" or sparkline([1, 2, 3]) == "▁▄█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([1, float("nan"), 2]) == "▁ █"
    assert sparkline([float("inf")]) == " "
