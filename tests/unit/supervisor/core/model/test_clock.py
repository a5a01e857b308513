"""The believed time, while the wall clock may be wrong."""

from hypothesis import example, given
from hypothesis import strategies as st

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.model.clock import (
    ANCHOR_NS,
    HOUR_NS,
    JUMP_NS,
    OFF_MAX_NS,
    SETTLE_NS,
    STEP_MAX_NS,
    TOLD_GAP_NS,
    Anchor,
    Clock,
    Steps,
)

DAY_NS = 24 * HOUR_NS
YEAR_NS = 365 * DAY_NS
NOW = 57 * YEAR_NS  # on the wall clock
UP = 3 * DAY_NS  # since the boot
BEFORE = Anchor("before", 9 * DAY_NS, NOW)


def noted(clock: Clock, boot_ns: int) -> Anchor:
    """Return the last believed moment that the store holds."""
    anchor = clock.anchor_due(boot_ns) or clock._noted
    assert anchor is not None
    return anchor


def restarted(clock: Clock, boot_ns: int, wall_ns: int, boot: str = "boot") -> Clock:
    """Return the clock of the next start, made from the noted moment."""
    return Clock(boot, boot_ns, wall_ns, noted(clock, boot_ns))


def believed(clock: Clock, boot_ns: int) -> int:
    return boot_ns + clock.offset_ns


def test_a_new_store_believes_the_clock() -> None:
    clock = Clock("boot", UP, NOW, None)
    assert (believed(clock, UP), clock.doubted, clock.forgets(UP)) == (NOW, False, True)


def test_a_start_in_1970_goes_on_from_what_was_known() -> None:
    clock = Clock("boot", 20 * SECOND_NS, 20 * SECOND_NS, BEFORE)
    assert clock.doubted
    assert clock.ahead_ns == 20 * SECOND_NS - NOW
    assert not clock.forgets(20 * SECOND_NS)
    later = 50 * SECOND_NS
    assert believed(clock, later) == NOW + 30 * SECOND_NS
    clock.read(later, NOW + 2 * DAY_NS)  # NTP has set the clock
    assert (clock.doubted, clock.forgets(later)) == (False, True)
    assert believed(clock, later) == NOW + 2 * DAY_NS


def test_a_start_a_year_ahead_is_doubted_until_a_person_says_so() -> None:
    clock = Clock("boot", UP, NOW + YEAR_NS, BEFORE)
    assert clock.doubted
    clock.read(UP + DAY_NS, NOW + YEAR_NS + DAY_NS)
    assert clock.doubted, "a clock that goes on is no better for it"
    assert believed(clock, UP + DAY_NS) == NOW + DAY_NS
    clock.accept(UP + DAY_NS, NOW + YEAR_NS + DAY_NS)
    assert (clock.doubted, clock.forgets(UP + DAY_NS)) == (False, True)
    assert believed(clock, UP + DAY_NS) == NOW + YEAR_NS + DAY_NS
    after = restarted(clock, UP + 2 * DAY_NS, NOW + YEAR_NS + 2 * DAY_NS)
    assert not after.doubted


def test_a_machine_that_was_off_for_a_while_is_believed_at_once() -> None:
    for off_ns in (0, HOUR_NS, 7 * DAY_NS, OFF_MAX_NS):
        clock = Clock("boot", UP, NOW + off_ns, BEFORE)
        assert (clock.doubted, clock.forgets(UP), clock.stepped_ns) == (False, True, 0)
    assert Clock("boot", UP, NOW + OFF_MAX_NS + 1, BEFORE).doubted


def test_a_clock_that_is_set_while_the_daemon_is_down_is_noticed() -> None:
    anchor = Anchor("boot", UP, NOW)
    clock = Clock("boot", UP + HOUR_NS, NOW + HOUR_NS + 2 * DAY_NS, anchor)
    assert clock.doubted, "the boot clock knows that it was an hour"
    assert not Clock("boot", UP + 9 * DAY_NS, NOW + 9 * DAY_NS, anchor).doubted


def test_a_step_of_hours_is_followed_and_nothing_is_forgotten_for_a_while() -> None:
    for step_ns in (-2 * HOUR_NS, 2 * HOUR_NS, -STEP_MAX_NS, STEP_MAX_NS):
        clock = Clock("boot", UP, NOW, None)
        clock.read(UP, NOW + step_ns)
        assert (clock.stepped_ns, clock.doubted) == (step_ns, False)
        assert believed(clock, UP) == NOW + step_ns
        assert not clock.forgets(UP + SETTLE_NS - 1)
        assert clock.forgets(UP + SETTLE_NS)
        clock.read(UP + SECOND_NS, NOW + step_ns + SECOND_NS)
        assert clock.stepped_ns == 0, "it is told once"


def test_a_larger_step_is_doubted_and_the_way_back_is_followed() -> None:
    for step_ns in (-STEP_MAX_NS - 1, STEP_MAX_NS + 1, -YEAR_NS, YEAR_NS):
        clock = Clock("boot", UP, NOW, None)
        clock.read(UP, NOW + step_ns)
        assert (clock.doubted, clock.ahead_ns, clock.forgets(UP)) == (True, step_ns, False)
        assert believed(clock, UP) == NOW
        clock.read(UP + SECOND_NS, NOW + SECOND_NS)
        assert (clock.doubted, clock.forgets(UP + SECOND_NS)) == (False, True)


def test_steps_are_told_at_once_and_then_once_a_minute() -> None:
    """Let two masters set the clock in turn, each second of an hour."""
    clock = Clock("boot", UP, NOW, None)
    assert clock.steps_due(UP) is None
    told = []
    for second in range(1, 3601):
        boot_ns = UP + second * SECOND_NS
        clock.read(boot_ns, NOW + second * SECOND_NS + second % 2 * HOUR_NS)
        if steps := clock.steps_due(boot_ns):
            told.append(steps)
    assert told[0] == Steps(HOUR_NS, 1)
    assert len(told) == 3600 * SECOND_NS // TOLD_GAP_NS
    assert {steps.count for steps in told[1:]} == {60}
    assert not clock.forgets(UP + HOUR_NS)
    clock.read(UP + HOUR_NS + SECOND_NS, NOW + HOUR_NS + SECOND_NS)
    last = clock.steps_due(UP + HOUR_NS + TOLD_GAP_NS)
    assert last is not None, "none goes untold"
    assert sum(steps.count for steps in [*told, last]) == 3600
    assert clock.steps_due(UP + 2 * HOUR_NS) is None


def test_what_ntp_does_is_nothing_to_speak_of() -> None:
    clock = Clock("boot", UP, NOW, None)
    clock.read(UP, NOW + JUMP_NS)
    assert (clock.stepped_ns, clock.forgets(UP)) == (0, True)


def test_the_moment_is_noted_now_and_then_and_when_it_changes() -> None:
    clock = Clock("boot", UP, NOW, None)
    assert clock.anchor_due(UP) == Anchor("boot", UP, NOW)
    assert clock.anchor_due(UP + ANCHOR_NS - 1) is None
    assert clock.anchor_due(UP + ANCHOR_NS) == Anchor("boot", UP + ANCHOR_NS, NOW + ANCHOR_NS)
    clock.accept(UP + ANCHOR_NS, NOW + YEAR_NS)
    assert clock.anchor_due(UP + ANCHOR_NS) == Anchor("boot", UP + ANCHOR_NS, NOW + YEAR_NS)


seconds = st.integers(0, 3 * DAY_NS)
steps = st.sampled_from(
    [0, 0, 0, SECOND_NS, JUMP_NS + 1, HOUR_NS, STEP_MAX_NS, STEP_MAX_NS + 1, 40 * DAY_NS, YEAR_NS]
)
events = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "restart", "reboot"]),
        seconds,
        st.tuples(steps, st.sampled_from([-1, 1])),
    ),
    max_size=30,
)


@given(events)
@example([("read", 0, (SECOND_NS, 1)), ("restart", 0, (STEP_MAX_NS + 1, -1))])
@example([("read", 0, (SECOND_NS, 1)), ("read", 0, (STEP_MAX_NS + 1, -1)), ("restart", 0, (0, -1))])
def test_whatever_happens_to_the_clock_time_is_believed_in_small_steps(story) -> None:
    """Neither one reading of the clock nor one start moves the believed time further than it may:
    the believed time decides what is deleted."""
    boots, boot_ns, wall_ns = 1, UP, NOW
    clock = Clock("boot-1", boot_ns, wall_ns, None)
    clock.anchor_due(boot_ns)
    for what, passed_ns, (step_ns, sign) in story:
        before, doubted, was_off = believed(clock, boot_ns), clock.doubted, clock._was_off
        boot_ns += passed_ns
        counted_ns = passed_ns  # the time that a trusted clock counts
        wall_ns = max(0, wall_ns + passed_ns + step_ns * sign)
        if what == "read":
            clock.read(boot_ns, wall_ns)
        elif what == "restart":
            anchor = noted(clock, boot_ns)  # the next start goes on from the noted moment
            counted_ns = anchor.wall_ns + boot_ns - anchor.boot_ns - before
            assert abs(counted_ns - passed_ns) <= JUMP_NS
            clock = Clock(f"boot-{boots}", boot_ns, wall_ns, anchor)
        else:
            anchor = noted(clock, boot_ns)
            boots, boot_ns, counted_ns = boots + 1, SECOND_NS, anchor.wall_ns - before
            clock = Clock(f"boot-{boots}", boot_ns, wall_ns, anchor)
        moved_ns = believed(clock, boot_ns) - before - counted_ns
        most_ns = OFF_MAX_NS if what == "reboot" or was_off else STEP_MAX_NS
        assert -STEP_MAX_NS <= moved_ns <= most_ns
        if clock.doubted:
            assert not clock.forgets(boot_ns)
            assert abs(moved_ns) <= JUMP_NS, "it goes on by the boot clock alone"
        else:
            assert believed(clock, boot_ns) == wall_ns
        if doubted and what == "restart" and not step_ns:
            assert clock.doubted, "a restart ends no doubt"


@given(events)
def test_a_person_has_the_last_word(story) -> None:
    boot_ns, wall_ns = UP, NOW
    clock = Clock("boot", boot_ns, wall_ns, None)
    for _, passed_ns, (step_ns, sign) in story:
        boot_ns += passed_ns
        wall_ns = max(0, wall_ns + passed_ns + step_ns * sign)
        clock.read(boot_ns, wall_ns)
        clock.accept(boot_ns, wall_ns)
        assert (believed(clock, boot_ns), clock.forgets(boot_ns)) == (wall_ns, True)


def test_a_store_that_was_begun_in_1970_follows_the_clock_when_it_is_set() -> None:
    """A new machine without a battery first starts before the network has set its clock."""
    start = 20 * SECOND_NS
    clock = Clock("boot", start, start, None)
    clock.read(start + SECOND_NS, start + SECOND_NS)
    clock.read(start + 9 * SECOND_NS, NOW)
    assert not clock.doubted
    assert clock.stepped_ns == NOW - start - 9 * SECOND_NS
    assert not clock.forgets(start + 9 * SECOND_NS), "not before it has settled"
    assert clock.forgets(start + 9 * SECOND_NS + SETTLE_NS)
    assert believed(clock, start + 9 * SECOND_NS) == NOW
    clock.read(start + 10 * SECOND_NS, start + 10 * SECOND_NS)
    assert clock.doubted, "it is not followed back"
    clock = Clock("boot", start, start, None)
    rebooted = restarted(clock, start, NOW, "another boot")
    assert not rebooted.doubted, "nor does a reboot in between make a doubt of it"


def test_that_the_machine_was_off_is_noted_until_the_clock_is_followed() -> None:
    """A restart before NTP has set the clock must not forget that the machine was off."""
    clock = Clock("boot", 20 * SECOND_NS, 20 * SECOND_NS, BEFORE)
    noted = clock.anchor_due(20 * SECOND_NS)
    assert noted is not None
    assert noted.was_off
    clock.read(25 * SECOND_NS, NOW + 5 * SECOND_NS)
    noted = clock.anchor_due(25 * SECOND_NS)
    assert noted is not None, "the same time, but nobody may add 30 days to it any more"
    assert not noted.was_off
    assert clock.anchor_due(26 * SECOND_NS) is None


def test_a_boot_clock_that_went_back_is_of_another_boot() -> None:
    """A container that is moved may keep the name of its boot."""
    clock = Clock("boot", HOUR_NS, NOW + 7 * DAY_NS, Anchor("boot", UP, NOW))
    assert not clock.doubted
    assert believed(clock, HOUR_NS) == NOW + 7 * DAY_NS
