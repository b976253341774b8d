"""From the tokens of a window to segments and words."""

import pytest

from crossattn.decode.speech.transcript import Word, compression, join_punctuation, split

T = 100  # the token of 0.00 s


def pieces(tokens, frames=3000):
    found, step = split(tokens, T, frames)
    return [(list(p.tokens), p.start, p.end) for p in found], step


def test_text_between_times_is_a_piece_and_half_a_phrase_is_heard_again():
    tokens = [T, 1, 2, T + 50, T + 60, 3, T + 150, T + 150, 4, 5]
    found, step = pieces(tokens)
    assert found == [([T, 1, 2, T + 50], 0.0, 1.0), ([T + 60, 3, T + 150], 1.2, 3.0)]
    assert step == 300


def test_a_lone_time_at_the_end_says_that_nothing_follows():
    found, step = pieces([T, 1, T + 50, T + 60, 3, T + 150])
    assert [(start, end) for _, start, end in found] == [(0.0, 1.0), (1.2, 3.0)]
    assert step == 3000


@pytest.mark.parametrize(
    ("tokens", "end"),
    [([T, 1, 2, T + 50], 1.0), ([T, 1, 2], 7.0), ([1, 2], 7.0), ([], 7.0), ([T], 7.0)],
)
def test_without_a_pair_of_times_the_window_is_one_piece(tokens, end):
    assert pieces(tokens, 700) == ([(tokens, 0.0, end)], 700)


def test_punctuation_goes_with_its_word():
    words = [
        Word(w, i + 0.0, i + 1.0, 1.0)
        for i, w in enumerate([" “", "Oh", ",", " no", "!", "”", " I"])
    ]
    assert [w.text for w in join_punctuation(words)] == [" “Oh,", " no!”", " I"]
    assert [(w.start, w.end) for w in join_punctuation(words)] == [(1, 2), (3, 4), (6, 7)]


def test_repetition_compresses_well():
    assert (
        compression("so " * 100) > 10 > 2.4 > compression("He was not an ill-disposed young man.")
    )
