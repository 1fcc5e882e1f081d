from acclimate_runners.words import Words


def test_words_come_at_once_where_something_begins_and_else_once_a_second() -> None:
    time, told = [0.0], list[tuple[int, int, str]]()
    words = Words(lambda *word: told.append(word), clock=lambda: time[0])
    words.now(1, 9, "digit")
    words.now(2, 9, "digit")
    words.again()
    assert told == [(1, 9, "digit")]
    time[0] = 1.0
    words.again()
    assert told[1:] == [(2, 9, "digit")]
    words.now(3, 9, "letter")
    words.say(4, 9, "letter")
    time[0] = 1.9
    words.again()
    assert told[2:] == [(3, 9, "letter"), (4, 9, "letter")]
