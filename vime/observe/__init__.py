"""What a run shows of itself: metrics and sinks, the live terminal view, the HTML report. Imports no torch."""
