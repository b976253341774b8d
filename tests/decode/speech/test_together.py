"""Jobs of any length that share their steps."""

from crossattn.decode.speech.together import Step, together


def counting(name, kinds):
    """A job that asks for steps of these kinds and returns what it was sent."""
    found = []
    for kind in kinds:
        found.append((yield Step(kind, (name,))))
    return name, found


def run(jobs, most=8):
    calls = []

    def take(steps):
        assert len({step.group for step in steps}) == 1
        calls.append((steps[0].group, [step.arrays[0] for step in steps]))
        return [step.arrays[0] + str(step.group) for step in steps]

    return together(jobs, take, most), calls


def test_every_job_gets_its_own_results_in_order():
    assert run([]) == ([], [])
    found, _ = run([counting("a", [1, 2]), counting("b", []), counting("c", [2, 1, 1])])
    assert found == [("a", ["a1", "a2"]), ("b", []), ("c", ["c2", "c1", "c1"])]


def test_steps_of_a_kind_are_taken_together_in_powers_of_two():
    _, calls = run([counting(name, [1, 2]) for name in "abcde"])
    assert calls == [(1, list("abcd")), (2, list("abcd")), (1, ["e"]), (2, ["e"])]


def test_no_more_jobs_are_begun_than_there_is_room_for():
    begun = []

    def jobs():
        for name in "abcd":
            begun.append(name)
            yield counting(name, [1])

    found, calls = run(jobs(), most=2)
    assert len(found) == 4 and max(len(names) for _, names in calls) == 2
    assert calls[0] == (1, ["a", "b"])
