"""Charts."""

from matplotlib.figure import Figure

from stages.reports.plots import show_percent


def test_ticks_of_shares_have_the_digits_that_they_need() -> None:
    axes = Figure().subplots()
    axes.set_yticks([0.75, 0.775, 0.8, 0.9925, 1])
    show_percent(axes.yaxis)
    labels = axes.yaxis.get_ticklabels()
    assert [label.get_text() for label in labels] == ["75%", "77.5%", "80%", "99.25%", "100%"]


def test_an_axis_of_shares_ends_at_0_and_100_percent() -> None:
    axes = Figure().subplots()
    axes.plot([0.02, 0.99], [0.4, 0.6])
    axes.margins(x=0.12, y=0.12)
    show_percent(axes.xaxis)
    show_percent(axes.yaxis)
    assert axes.get_xlim() == (0, 1)
    assert axes.get_ylim() == (0.376, 0.624)
