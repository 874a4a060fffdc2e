"""The results of a comparison as the terminal prints them."""

from evaluation.compare.outcome import in_words, results_table


def test_results_in_words() -> None:
    pair = {
        "policy_a": "a", "policy_b": "b", "different": True, "num_failed": 0,
        "win_rate": {"mean": 0.25, "low": 0.1, "high": None, "num_prompts": 1200},
        "significance": {"holm_p": 0.0123456}, "power": {"detectable": 0.08},
        "verdicts": {"wins": 300, "ties": 0, "losses": 900},
    }  # fmt: skip
    assert in_words(pair) == "b is better"
    assert in_words({**pair, "different": False}) == "no difference shown; 58.0% would be"
    few = {**pair, "different": False, "power": {"detectable": None}}
    assert in_words(few) == "no difference shown: too few prompts"
    tied = {**few, "verdicts": {"wins": 0, "ties": 1200, "losses": 0}}
    assert in_words(tied) == "no difference shown: all verdicts are ties"
    table = results_table({"summary": {"judges": [{"judge": "j", "pairs": [{**pair, "num_failed": 3}]}]}})
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == [
        "j", "a against b", "25.0% (10.0% to ?)", "0.0123", "1,200", "b is better; 3 verdicts failed"
    ]  # fmt: skip
